import asyncio
import time

from parallm.server.operation.stream_coalescing import MANY_STREAMS, StreamCoalescer


async def rests(num_streams: int, coalesce_ms: float) -> list[float]:
    """Seconds that each stream has rested."""
    coalescer = StreamCoalescer(coalesce_ms)

    async def one() -> float:
        with coalescer.stream():
            await asyncio.sleep(0)
            began = time.perf_counter()
            await coalescer.rest()
            return time.perf_counter() - began

    return await asyncio.gather(*(one() for _ in range(num_streams)))


def test_many_streams_rest_until_the_same_beat() -> None:
    found = asyncio.run(rests(MANY_STREAMS + 1, 60))
    assert 0.05 < min(found) <= max(found) < 0.5


def test_few_streams_and_a_pace_of_zero_do_not_rest() -> None:
    assert max(asyncio.run(rests(MANY_STREAMS, 1000))) < 0.5
    assert max(asyncio.run(rests(MANY_STREAMS + 1, 0))) < 0.5
