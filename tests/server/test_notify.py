"""What a service manager hears, at a socket that stands for systemd's."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallm.server.operation import notify
from parallm.server.operation.notify import ServiceManager


@contextmanager
def hearing(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(address)
        ear.settimeout(10)
        yield ear


def heard(ear: socket.socket) -> str:
    return ear.recv(4096).decode()


async def answer_at_once() -> None: ...


@pytest.mark.parametrize("form", ["path", "abstract"])
def test_a_start_asks_for_time_and_a_process_tells_that_it_is_ready_and_that_it_stops(
    form: str, tmp_path: Path
) -> None:
    name = str(tmp_path / "notify") if form == "path" else f"@parallm-test-{os.getpid()}"
    environment = {"NOTIFY_SOCKET": name}

    async def run(ear: socket.socket) -> list[str]:
        manager, found = ServiceManager(environment), []
        async with manager.starting("loading nano"):
            await asyncio.sleep(0)
            found.append(heard(ear))
        async with manager.running(answer_at_once, lambda: "serving"):
            found.append(heard(ear))
            manager.stopping()
            found.append(heard(ear))
        ear.setblocking(False)
        with pytest.raises(BlockingIOError):
            ear.recv(10)  # it is told once that it stops, and an unwatched process feeds no watchdog
        return found

    with hearing(name if form == "path" else "\0" + name[1:]) as ear:
        assert asyncio.run(run(ear)) == [
            "EXTEND_TIMEOUT_USEC=30000000\nSTATUS=loading nano",
            "READY=1\nSTATUS=serving",
            "STOPPING=1\nSTATUS=finishing the answers under way",
        ]
    assert environment == {}  # child processes say nothing


def test_the_watchdog_is_fed_by_the_device_and_not_by_the_event_loop(tmp_path: Path) -> None:
    environment = {
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": "20000",
        "WATCHDOG_PID": str(os.getpid()),
    }

    async def run(ear: socket.socket) -> list[str]:
        answers, stuck = asyncio.Semaphore(3), asyncio.Event()

        async def ping() -> None:
            await answers.acquire()  # the fourth never comes
            if answers.locked():
                stuck.set()

        async with ServiceManager(environment).running(ping, lambda: "serving"):
            await stuck.wait()
            await asyncio.sleep(0.2)  # ten times as long as the watchdog waits
        ear.setblocking(False)
        found = []
        while True:
            try:
                found.append(heard(ear))
            except BlockingIOError:
                return found

    with hearing(str(tmp_path / "notify")) as ear:
        assert asyncio.run(run(ear)).count("WATCHDOG=1") == 3


def test_a_new_status_is_told_and_the_same_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "SECONDS_BETWEEN_LOOKS", 0.001)
    states = iter(["one", "one", "one", "two", "two"])

    async def run(ear: socket.socket) -> list[str]:
        manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        async with manager.running(answer_at_once, lambda: next(states, "two")):
            return [await asyncio.to_thread(heard, ear) for _ in range(2)]

    with hearing(str(tmp_path / "notify")) as ear:
        assert asyncio.run(run(ear)) == ["READY=1\nSTATUS=one", "STATUS=two"]


def test_without_a_manager_or_with_a_deaf_one_nothing_happens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run(environment: dict[str, str]) -> None:
        manager = ServiceManager(environment)
        async with manager.starting("x"), manager.running(answer_at_once, lambda: "y"):
            await asyncio.sleep(0)

    asyncio.run(run({}))
    assert caplog.records == []
    asyncio.run(run({"NOTIFY_SOCKET": str(tmp_path / "nobody")}))
    assert len(caplog.records) == 1
