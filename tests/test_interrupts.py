import asyncio

import pytest

from parallm.interrupts import unless


def test_work_that_ends_in_time_gives_its_result() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    async def main() -> int | None:
        return await unless(asyncio.Event(), work())

    assert asyncio.run(main()) == 7


def test_work_is_cancelled_and_has_ended_when_the_event_is_set() -> None:
    ends: list[str] = []

    async def work() -> int:
        try:
            await asyncio.sleep(60)
            return 7
        finally:
            await asyncio.sleep(0)  # cleaning up may take its time
            ends.append("cleaned up")

    async def main() -> None:
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, over.set)
        assert await unless(over, work()) is None
        assert ends == ["cleaned up"]

    asyncio.run(main())


def test_an_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ValueError("broken")

    async def main() -> None:
        await unless(asyncio.Event(), work())

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(main())
