import asyncio
import time

from parallm.server.operation.stream_coalescing import MANY_STREAMS, StreamCoalescer


async def waits(num_streams: int, coalesce_ms: float) -> list[float]:
    """Return the seconds that each stream has waited."""
    coalescer = StreamCoalescer(coalesce_ms)

    async def stream() -> float:
        with coalescer.stream():
            await asyncio.sleep(0)
            began = time.perf_counter()
            await coalescer.wait()
            return time.perf_counter() - began

    return await asyncio.gather(*(stream() for _ in range(num_streams)))


def test_many_streams_wait_for_the_same_tick() -> None:
    seconds = asyncio.run(waits(MANY_STREAMS + 1, 60))
    assert 0.05 < min(seconds) <= max(seconds) < 0.5


def test_few_streams_do_not_wait_nor_do_many_with_an_interval_of_zero() -> None:
    assert max(asyncio.run(waits(MANY_STREAMS, 1000))) < 0.5
    assert max(asyncio.run(waits(MANY_STREAMS + 1, 0))) < 0.5
