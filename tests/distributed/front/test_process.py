"""The front as a process: with its starter, without it, killed, and told to end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from bench.fake_worker import FakeWorker
from bench.processes import free_port

from parallm.distributed.front import process
from parallm.distributed.front.process import FrontProcess, standing_front
from parallm.distributed.gang import Interrupts, NoFront
from parallm.distributed.identity import FRONT, LISTEN
from parallm.distributed.settings import FrontSettings
from parallm.server.operation.sockets import ListenError
from parallm.server.settings import ServerSettings

ROOT = Path(__file__).parents[3]
SECONDS = 20.0


@contextmanager
def standing() -> Iterator[tuple[FrontProcess, Interrupts, str]]:
    interrupts, server = Interrupts(), ServerSettings(port=0, drain_seconds=1)
    with standing_front(server, FrontSettings(), interrupts) as front:
        assert isinstance(front, FrontProcess)
        yield front, interrupts, front.url


def answer(url: str, path: str = "/health", **options: object) -> httpx.Response:
    return httpx.request("GET", f"{url}{path}", trust_env=False, timeout=SECONDS, **options)  # type: ignore[arg-type]


def until(is_so: object) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def fake_process() -> Iterator[int]:
    port = free_port()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    own = subprocess.Popen([sys.executable, "-m", "bench.fake_worker", str(port)], env=environment)
    try:
        yield port
    finally:
        own.kill()
        own.wait()


def test_workers_get_addresses_and_are_answered_for() -> None:
    with fake_process() as port, standing() as (front, _, url):
        assert front.assign(["127.0.0.1", "::1"], [port, 1]) == [
            {LISTEN: f"127.0.0.1:{port}", FRONT: url},
            {LISTEN: "[::1]:1", FRONT: url},
        ]
        until(lambda: answer(url).json()["workers"] == [0])
        body = {"messages": [], "max_tokens": 1}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False).status_code == 200


def test_a_killed_front_is_started_again_and_loses_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SECONDS_BETWEEN_STARTS", 0.1)
    with fake_process() as port, standing() as (front, _, url):
        front.set_workers({0: f"http://127.0.0.1:{port}"})
        until(lambda: answer(url).json()["workers"] == [0])
        first = front.pid
        os.kill(first, signal.SIGKILL)
        assert answer(url, "/v1/none").status_code == 404, "the socket is its starter's, so that the client waits"
        assert front.pid != first
        assert answer(url).json()["workers"] == [0]


def test_a_front_ends_with_its_starter() -> None:
    script = """
import os, sys, time
from parallm.distributed.front.process import standing_front
from parallm.distributed.gang import Interrupts, NoFront
from parallm.distributed.settings import FrontSettings
from parallm.server.settings import ServerSettings
with standing_front(ServerSettings(port=0, drain_seconds=0), FrontSettings(), Interrupts()) as front:
    print(front.pid, flush=True)
    time.sleep(60)
"""
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    starter.kill()
    starter.wait()
    starter.stdout.close()
    until(lambda: not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_after_a_signal_new_requests_are_refused_and_the_front_stays() -> None:
    with fake_process() as port, standing() as (front, interrupts, url):
        front.set_workers({0: f"http://127.0.0.1:{port}"})
        until(lambda: answer(url).json()["workers"] == [0])
        with interrupts.counted():
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: interrupts.received)
        body = {"messages": [], "max_tokens": 1}
        until(lambda: httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False).status_code == 503)
        assert answer(url).json()["workers"] == [0]
        assert answer(url, "/v1/none").status_code == 404


def test_requests_that_wait_are_answered_when_the_front_ends() -> None:
    async def ask(url: str) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False, timeout=SECONDS) as client:
            return await client.post(f"{url}/v1/chat/completions", json={})

    async def run() -> None:
        with standing() as (_, _, url):
            until(lambda: answer(url).status_code == 200)
            waiting = asyncio.create_task(ask(url))
            await asyncio.sleep(0.5)
            assert not waiting.done()
        assert (await waiting).status_code == 503

    asyncio.run(run())


def test_there_may_be_no_front() -> None:
    for server, settings in (
        (ServerSettings(enabled=False), FrontSettings()),
        (ServerSettings(port=0), FrontSettings(enabled=False)),
    ):
        with standing_front(server, settings, Interrupts()) as front:
            assert isinstance(front, NoFront)
            assert front.assign(["127.0.0.1"] * 2, [1, 2]) == [{}, {}]


def test_a_taken_port_is_told_before_anything_starts() -> None:
    async def run() -> None:
        fake = FakeWorker()
        await fake.start()
        with (
            pytest.raises(ListenError, match="in use"),
            standing_front(ServerSettings(port=fake.port), FrontSettings(), Interrupts()),
        ):
            pass
        fake.stop()

    asyncio.run(run())


def test_the_command_stands_before_given_addresses(tmp_path: Path) -> None:
    with fake_process() as first, fake_process() as second:
        port = free_port()
        urls = ",".join(f"http://127.0.0.1:{one}" for one in (first, second))
        command = [sys.executable, "-m", "parallm.front", f"workers=[{urls}]", f"server.port={port}"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        own = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        assert own.stdout is not None
        try:
            answers_for = f"http://127.0.0.1:{first}, http://127.0.0.1:{second}"
            assert own.stdout.readline() == f"http://127.0.0.1:{port} answers for {answers_for} until Ctrl-C\n"
            until(lambda: answer(f"http://127.0.0.1:{port}").json()["workers"] == [0, 1])
            own.send_signal(signal.SIGINT)
            assert own.wait(SECONDS) == 0
        finally:
            own.kill()
            own.wait()
            own.stdout.close()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([], "workers: "),
        (["workers=[node1:8000]"], "node1:8000 is no address of a worker"),
        (["workers=[http://a]", "model.path=x"], "model"),
    ],
)
def test_a_wrong_command_is_told_in_one_line(tmp_path: Path, keys: list[str], words: str) -> None:
    command = [sys.executable, "-m", "parallm.front", *keys]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (78, 1), done.stderr
    assert words in done.stderr
