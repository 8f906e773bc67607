import mlx.core as mx

from parallm.device.streams import MAX_CPU_STREAMS, DeviceStreams, available_cores


def test_a_product_gets_one_thread_and_each_core_a_stream_on_a_cpu() -> None:
    threads: list[int] = []
    width = DeviceStreams(threads.append).width
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    assert (threads, width) == ([1], min(available_cores(), MAX_CPU_STREAMS) if on_cpu else 1)


def test_items_keep_their_order_and_run_on_their_streams(streams: DeviceStreams) -> None:
    used = streams.run(lambda _: mx.default_stream(mx.default_device()), range(2 * streams.width))
    assert used == streams.handles * 2
    squares = streams.run(lambda number: mx.full((3,), number) ** 2, range(7))
    assert [array.tolist() for array in squares] == [[number**2] * 3 for number in range(7)]
