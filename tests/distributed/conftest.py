"""Workers as processes, as a launcher starts them, and several exchanges in one process."""

import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import pytest

from parallm.distributed.channel import Channel, Link
from parallm.distributed.exchange import add_slots
from parallm.distributed.identity import COORDINATOR

ROOT = Path(__file__).parent.parent.parent
TINY = (
    *("+recipe=arithmetic_grpo", "trainer.steps=3", "trainer.evaluate_problems=4", "trainer.evaluate_every=0"),
    *("rollout.problems_per_step=3", "rollout.group_size=4", "rollout.temperature=1.5", "checkpoint.every=100"),
    *("server=off", "metrics.display=off", "metrics.curves=false", "learner.micro_batch_tokens=128", "distributed=mlx"),
)
LIMIT_SECONDS = 300
DIGEST = re.compile(r"all workers hold version (\d+), digest (\w+)")


@pytest.fixture
def channels() -> Iterator[Callable[..., list[Channel]]]:
    """Channels of several ranks, connected with each other: `channels(3, timeout_seconds=5)`."""
    made: list[Channel] = []

    def connect(size: int, *, timeout_seconds: float = 10.0) -> list[Channel]:
        pairs = [socket.socketpair() for _ in range(1, size)]
        leader = [Link(ours, rank) for rank, (ours, _) in enumerate(pairs, 1)]
        sides = [leader, *([Link(theirs, 0)] for _, theirs in pairs)]
        made.extend(
            Channel(rank, links, size=size, timeout_seconds=timeout_seconds) for rank, links in enumerate(sides)
        )
        return made

    yield connect
    for channel in made:
        channel.close()


class Together:
    """The exchanges of several ranks in one process, which run one after the other up to each exchange."""

    def __init__(self, size: int, *, exact: bool) -> None:
        self.size = size
        self.exact = exact
        self._parts: dict[str, dict[int, tuple[bytes, Future[list[bytes]]]]] = {}
        self._sums: dict[int, tuple[Mapping[int, mx.array], Future[mx.array]]] = {}
        self.posts: queue.SimpleQueue[tuple[int, bytes | None]] = queue.SimpleQueue()

    def rank(self, rank: int) -> "Member":
        return Member(self, rank)

    def gather(self, rank: int, label: str, part: bytes) -> Future[list[bytes]]:
        future: Future[list[bytes]] = Future()
        arrived = self._parts.setdefault(label, {})
        arrived[rank] = (part, future)
        if len(arrived) == self.size:
            for _, waiting in arrived.values():
                if not waiting.cancelled():
                    waiting.set_result([arrived[rank][0] for rank in range(self.size)])
            del self._parts[label]
        return future

    def sum_slots(self, rank: int, vectors_N: Mapping[int, mx.array], used: Sequence[int]) -> Future[mx.array]:
        future: Future[mx.array] = Future()
        self._sums[rank] = (vectors_N, future)
        if len(self._sums) == self.size:
            every = {slot: vector_N for vectors_N, _ in self._sums.values() for slot, vector_N in vectors_N.items()}
            total_N = add_slots([every[slot] for slot in used])
            for _, waiting in self._sums.values():
                waiting.set_result(total_N)
            self._sums = {}
        return future


class Member:
    """The exchange of one rank of `Together`."""

    failure = None

    def __init__(self, together: Together, rank: int) -> None:
        self.rank, self.size = rank, together.size
        self._together = together

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)

    def gather(self, label: str, part: bytes) -> Future[list[bytes]]:
        return self._together.gather(self.rank, label, part)

    def all_gather(self, label: str, part: bytes) -> Future[list[bytes]]:
        return self.gather(label, part)

    def post(self, content: bytes) -> None:
        self._together.posts.put((self.rank, content))

    def take_post(self, seconds: float) -> tuple[int, bytes | None] | None:
        with suppress(queue.Empty):
            return self._together.posts.get(timeout=seconds) if seconds else self._together.posts.get_nowait()
        return None

    def finish(self) -> None: ...

    def loss(self) -> Future[list[bytes]]:
        return Future()

    def sum_slots(
        self, vectors_N: Mapping[int, mx.array], used: Sequence[int], slots: int, length: int
    ) -> Future[mx.array]:
        return self._together.sum_slots(self.rank, vectors_N, used)

    def take_seconds(self) -> dict[str, float]:
        return {}

    def close(self, reason: str = "") -> None: ...


class Workers:
    """Processes that a launcher would have started, one for each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, size: int, *keys: str, changes: Mapping[int, Sequence[str]] | None = None) -> None:
        """Start `size` workers of a tiny run in the folder; `changes` has further keys of ranks."""
        ports = free_ports(size + 1)
        hosts = self.folder / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[:size]]))
        usual = os.environ | {
            "PYTHONPATH": str(ROOT),
            "MLX_HOSTFILE": str(hosts),
            COORDINATOR: f"127.0.0.1:{ports[-1]}",
        }
        for rank in range(size):
            command = [sys.executable, "-m", "parallm.train", *TINY, f"hydra.run.dir={self.folder / 'run'}", *keys]
            self.processes.append(
                subprocess.Popen(
                    [*command, *(changes or {}).get(rank, ())],
                    env=usual | {"MLX_RANK": str(rank)},
                    cwd=self.folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def wait(self) -> list[tuple[int, str]]:
        """Exit code and output of each rank."""
        outputs = [""] * len(self.processes)

        def read(rank: int) -> None:
            outputs[rank] = self.processes[rank].communicate(timeout=LIMIT_SECONDS)[0]

        threads = [threading.Thread(target=read, args=(rank,)) for rank in range(len(self.processes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_SECONDS + 10)
        ended = [(process.returncode, output) for process, output in zip(self.processes, outputs, strict=True)]
        self.end()
        return ended

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []

    def run(self, size: int, *keys: str) -> None:
        """Train to the end; every rank must end well."""
        self.start(size, *keys)
        ended = self.wait()
        assert [code for code, _ in ended] == [0] * size, ended

    def digests(self) -> dict[int, str]:
        """The digest of each version that all workers held, by its number."""
        text = (self.folder / "run" / "run.log").read_text()
        return {int(version): digest for version, digest in DIGEST.findall(text)}

    def status(self, rank: int) -> dict[str, object]:
        values: dict[str, object] = json.loads((self.folder / "run" / "ranks" / str(rank) / "worker.json").read_text())
        return values


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Callable[[str], Workers]]:
    """Makes `Workers` in a folder of this name."""
    made: list[Workers] = []

    def make(name: str) -> Workers:
        (tmp_path / name).mkdir()
        made.append(Workers(tmp_path / name))
        return made[-1]

    yield make
    for one in made:
        one.end()


def ring(folder: Path, size: int) -> list[dict[str, str]]:
    """The environment of each rank."""
    ports, hosts = free_ports(size), folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    known = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    usual = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, known)), "MLX_HOSTFILE": str(hosts)}
    return [usual | {"MLX_RANK": str(rank)} for rank in range(size)]


def run_ranks(folder: Path, module: str, *arguments: str, limit_seconds: float = 120) -> None:
    """Run a module as two ranks of a ring. Both must end well."""
    command = [sys.executable, "-m", module, *arguments]
    ranks = [subprocess.Popen(command, env=environment) for environment in ring(folder, 2)]
    try:
        assert [rank.wait(limit_seconds) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
