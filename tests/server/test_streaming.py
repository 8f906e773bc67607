import asyncio
from collections.abc import AsyncGenerator

import pytest

from parallm.server.generation import merged


class Counter:
    """Counts up; `num_closed` says how many of its streams have run their clean-up."""

    def __init__(self) -> None:
        self.num_closed = 0

    async def stream(self, limit: int, error: Exception | None = None) -> AsyncGenerator[int, None]:
        try:
            for number in range(limit):
                await asyncio.sleep(0)
                yield number
            if error is not None:
                raise error
        finally:
            self.num_closed += 1


def test_items_come_with_the_number_of_their_stream_and_in_its_order() -> None:
    async def run() -> list[tuple[int, int]]:
        counter = Counter()
        return [item async for item in merged([counter.stream(3), counter.stream(0), counter.stream(2)])]

    assert sorted(asyncio.run(run())) == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]


def test_an_error_of_one_stream_is_raised_and_closes_the_others() -> None:
    async def run(counter: Counter) -> None:
        async for _ in merged([counter.stream(10**9), counter.stream(2, ValueError("bad"))]):
            pass

    counter = Counter()
    with pytest.raises(ValueError, match="bad"):
        asyncio.run(run(counter))
    assert counter.num_closed == 2


def test_closing_closes_all_streams() -> None:
    async def run(counter: Counter) -> None:
        stream = merged([counter.stream(10**9), counter.stream(10**9)])
        await anext(stream)
        await stream.aclose()

    counter = Counter()
    asyncio.run(run(counter))
    assert counter.num_closed == 2
