"""The file of the buffer as lines: their order, and disks that refuse some of them."""

import asyncio
import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallm.checkpoint import format
from parallm.rollout.live import journal
from parallm.rollout.live.journal import Journal, read_journal


class Disk:
    """Refuses to open files by their endings on demand, and can delay a write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused: tuple[str, ...] = ()
        self.num_synced = 0
        self.is_free = threading.Event()
        self.is_free.set()
        opened, sync = journal._opened, format.sync

        def open_file(file: Path, mode: str) -> object:
            self.is_free.wait(10)
            if file.name.endswith(self.refused):
                raise OSError(errno.ENOSPC, "No space left on device")
            return opened(file, mode)  # type: ignore[arg-type]

        def count(path: Path) -> None:
            self.num_synced += 1
            sync(path)

        monkeypatch.setattr(journal, "_opened", open_file)
        monkeypatch.setattr(format, "sync", count)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def lines(file: Path) -> Iterator[Journal]:
    made = Journal(file)
    yield made
    made.close()


def put(lines: Journal, *numbers: int) -> None:
    for number in numbers:
        lines.append({"number": number})


def renew(lines: Journal, *numbers: int) -> None:
    lines.rewrite({"number": number} for number in numbers)


def numbers_in(file: Path) -> list[int]:
    return [line["number"] for line in read_journal(file)]


def test_lines_that_wait_are_written_in_their_order_and_synced_together(lines: Journal, disk: Disk, file: Path) -> None:
    async def main() -> None:
        disk.is_free.clear()
        put(lines, 0)
        waiting = asyncio.create_task(lines.written())
        put(lines, *range(1, 100))
        asyncio.get_running_loop().call_later(0.05, disk.is_free.set)
        await asyncio.wait_for(waiting, 10)
        await lines.written()
        assert numbers_in(file) == list(range(100))

    asyncio.run(main())
    lines.close()
    assert disk.num_synced <= 2


def test_a_full_disk_keeps_the_long_file_and_goes_on_with_it(lines: Journal, disk: Disk, file: Path) -> None:
    async def main() -> None:
        put(lines, 1, 2, 3)
        await lines.written()
        disk.refused = (".tmp",)
        renew(lines, 3)
        put(lines, 4)
        await lines.written()
        assert numbers_in(file) == [1, 2, 3, 4]
        disk.refused = ()
        renew(lines, 3, 4)
        put(lines, 5)
        await lines.written()
        assert numbers_in(file) == [3, 4, 5]

    asyncio.run(main())


def test_refused_lines_are_written_when_there_is_room_again(lines: Journal, disk: Disk, file: Path) -> None:
    async def main() -> None:
        put(lines, 1)
        await lines.written()
        disk.refused = (".jsonl", ".tmp")
        for number in (2, 3):
            put(lines, number)
            with pytest.raises(OSError, match="No space"):
                await lines.written()
        disk.refused = ()
        for number in (4, 5):
            put(lines, number)
            await lines.written()
        assert numbers_in(file) == [1, 2, 3, 4, 5]

    asyncio.run(main())


def test_lines_that_only_a_refused_rewrite_still_has_count_as_written_with_it_alone(
    lines: Journal, disk: Disk, file: Path
) -> None:
    async def main() -> None:
        disk.refused = (".jsonl", ".tmp")
        put(lines, 1)
        renew(lines, 1, 2)
        with pytest.raises(OSError, match="No space"):
            await lines.written()
        disk.refused = (".tmp",)  # the short lines would fit, the whole file does not
        put(lines, 3)
        with pytest.raises(OSError, match="No space"):
            await lines.written()
        disk.refused = ()
        put(lines, 4)
        await lines.written()
        assert numbers_in(file) == [1, 2, 3, 4]

    asyncio.run(main())


@pytest.mark.parametrize("rest", ["", '{"number": 7', '{"number": 7}', "\x00\x00\xff"])
def test_what_follows_half_a_line_is_whole(file: Path, rest: str) -> None:
    file.write_text('{"number": 1}\n' + rest)
    again = Journal(file)
    put(again, 2)
    again.close()
    assert numbers_in(file)[:1] + numbers_in(file)[-1:] == [1, 2]


def test_nesting_without_end_costs_its_line_alone(file: Path) -> None:
    file.write_text("[" * 100_000 + "\n" + '{"number": 1}\n')
    assert numbers_in(file) == [1]
