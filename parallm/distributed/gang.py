"""Gangs: the workers of a run, started together, watched, and started again when one is lost. Imports no MLX.

`launcher.py` starts them on this machine, `conductor.py` on the nodes of a Ray cluster. A group of mx.distributed has a
fixed size and cannot be mended, so whatever is lost, the others save and end, and a new gang goes on.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from parallm.distributed.identity import COORDINATOR, Backend
from parallm.distributed.settings import DistributedSettings
from parallm.distributed.team import EXCHANGE_FAILED, RANKS, STATUS
from parallm.errors import ExchangeFailed
from parallm.interrupts import show_cursor

STOP_SECONDS = 2.0
"""Time after a failure until the other workers get SIGTERM: those that have joined know it by then, and save."""
SAVED_SECONDS = 10.0
"""Time until the others are killed after one has saved what they would save, and ended."""
KILL_SECONDS = 120.0
"""Time after a failure until the others are killed in any case."""
POLL_SECONDS = 0.1
SIGNALLED = 128
"""Exit code of a process that a signal killed, less the signal's number, as shells count."""
INTERRUPTED = 130
SIGNAL_CODES = frozenset((-signal.SIGTERM, -signal.SIGINT, INTERRUPTED))
"""Exit codes of a worker that a signal has ended before it listened; Ctrl-C in a terminal goes to workers, too."""
GANGS = "gangs.jsonl"
"""File in `RUN/ranks` with a line for each gang: how long it has trained, and how each of its workers ended."""
STATES = ("step_*/", f"{RANKS}/*/step_*/")
State = tuple[int, int]
"""A checkpoint folder by inode and time of its last change, which it keeps when it is renamed."""


class Worker(Protocol):
    """A started worker; subprocess.Popen is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the worker runs."""

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


class Front(Protocol):
    """The front before the workers, if there is one."""

    def assign(self, hosts: Sequence[str], ports: Sequence[int]) -> list[dict[str, str]]:
        """Take these addresses for the workers' HTTP; return the environment of each rank."""


class NoFront:
    """In place of a front: workers have the addresses of their configuration."""

    def assign(self, hosts: Sequence[str], ports: Sequence[int]) -> list[dict[str, str]]:
        return [{} for _ in hosts]


class Machines(Protocol):
    """The machines on which workers run."""

    def start(self, overrides: Sequence[str]) -> Sequence[Worker]:
        """Start a gang with these keys behind those of the command. Raises ConfigError, ExchangeFailed."""

    def has_more(self) -> bool:
        """Whether it is time to start a larger gang in place of the one at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a worker has ended. Example: `End(rank=1, code=-9, host="node-2", reason="", was_lost=True)`."""

    rank: int
    code: int
    """Exit code; negative: the signal that killed it."""
    host: str
    """Machine, as the worker has written it; empty if it has not come so far."""
    reason: str
    """The worker's own reason; empty for one that has ended without a word."""
    was_lost: bool
    """Whether it was killed, or ended without a word, before anyone asked it to end."""

    @property
    def is_given(self) -> bool:
        """Whether the worker has ended itself for a reason of its own, which it would meet again."""
        return self.code > 0 and self.code != EXCHANGE_FAILED and not self.was_lost

    def __str__(self) -> str:
        return f"rank {self.rank} " + (
            f"was killed by signal {-self.code}" if self.code < 0 else f"ended with {self.code}"
        )


class Interrupts:
    """Counts Ctrl-C and SIGTERM: the first asks the workers to stop, the second kills them."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.on_signal: Callable[[], object] = lambda: None

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count those of the block, in place of whatever they did before."""
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, _: Any) -> None:
        self.received.append(number)
        self.on_signal()


def run_gangs(
    machines: Machines, settings: DistributedSettings, folder: Path, *, resume: str, interrupts: Interrupts
) -> int:
    """Start gangs until one has trained to the end, cannot, or `settings.restarts` are used up; return the exit code.

    `folder` is that of the run, `resume` the `checkpoint.resume` of the command. Raises ConfigError.
    """
    overrides: tuple[str, ...] = ()
    restarts = 0
    before = _states(folder)
    while True:
        try:
            workers = machines.start(overrides)
        except ExchangeFailed as error:
            _say(str(error))
            return INTERRUPTED if interrupts.received else EXCHANGE_FAILED
        gang, began = Gang(workers), time.time()
        try:
            gang.watch(machines, interrupts)
        finally:
            gang.kill()
        ends = gang.ends(folder)
        _record(folder, began, ends)
        code = exit_code(ends)
        if len(interrupts.received) > 1:
            show_cursor()  # rank 0 was killed, and could not
            return INTERRUPTED
        if code == 0 and (interrupts.received or not gang.is_growing):
            return 0
        if interrupts.received and ended_of_signals(ends):
            return SIGNALLED + interrupts.received[0]
        if code:
            what = f"{', '.join(map(str, ends))}; reasons are in {folder}/{RANKS}/{GANGS}"
            if interrupts.received or not may_restart(ends) or restarts == settings.restarts:
                _say(what)
                return code
            restarts += 1
            _say(f"{what}; starting again from the last finished step, restart {restarts} of {settings.restarts}")
        else:
            _say("starting again with more workers")
        overrides = (f"checkpoint.resume={_next_resume(resume, before, _states(folder))}",)


def may_restart(ends: Sequence[End]) -> bool:
    """Whether a new gang may get further: a worker was lost, or all have lost each other."""
    return any(end.was_lost for end in ends) or not any(end.is_given for end in ends)


def ended_of_signals(ends: Sequence[End]) -> bool:
    """Whether workers have ended of the signal that all got, as while they load, and others at most because of them."""
    codes = {end.code for end in ends}
    return bool(codes & SIGNAL_CODES) and codes <= {0, *SIGNAL_CODES, EXCHANGE_FAILED}


def exit_code(ends: Sequence[End]) -> int:
    """The exit code of a gang: that of the worker at fault, not of those that have lost it."""
    failed = sorted((end for end in ends if end.code), key=lambda end: (not end.was_lost, not end.is_given))
    codes = [end.code for end in failed]
    if not codes:
        return 0
    first = next((code for code in codes if code != EXCHANGE_FAILED), EXCHANGE_FAILED)
    return SIGNALLED - first if first < 0 else first


def variables(backend: Backend, hosts: Sequence[str], ports: Sequence[int], coordinator: int) -> list[dict[str, str]]:
    """The environment of each rank for mx.distributed and the channel, but for MLX_HOSTFILE and CUDA_VISIBLE_DEVICES.

    `hosts` and `ports`: of each rank, for mx.distributed. `coordinator` is a port of rank 0's host, for the channel.
    """
    usual = {COORDINATOR: f"{hosts[0]}:{coordinator}"}
    if backend == "nccl":
        usual |= {
            "NCCL_HOST_IP": hosts[0],
            "NCCL_PORT": str(ports[0]),
            "MLX_WORLD_SIZE": str(len(hosts)),
            "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0"),  # not every host allows multicast
        }
    return [usual | {"MLX_RANK": str(rank)} for rank in range(len(hosts))]


def ring_hosts(hosts: Sequence[str], ports: Sequence[int]) -> str:
    """The content of MLX_HOSTFILE."""
    return json.dumps([[f"{host}:{port}"] for host, port in zip(hosts, ports, strict=True)])


def free_ports(host: str, count: int) -> list[int]:
    """Ports of an interface of this machine that nothing listens on now."""
    sockets = [socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) for _ in range(count)]
    try:
        for one in sockets:
            one.bind((host, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


class Gang:
    """The workers of one start."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._asked: set[int] = set()  # ranks that were asked to end: a second signal would end them without saving
        self._lost: set[int] = set()
        self.is_growing = False
        """Whether the workers were asked to end for the sake of a larger gang."""

    def watch(self, machines: Machines, interrupts: Interrupts) -> None:
        """Wait until all have ended: once one has failed the others have some time to save."""
        failed_at = saved_at = float("inf")
        num_seen = 0
        while any(worker.poll() is None for worker in self._workers):
            time.sleep(POLL_SECONDS)
            now, codes = time.monotonic(), [worker.poll() for worker in self._workers]
            if not interrupts.received:
                self._lost |= {rank for rank, code in enumerate(codes) if code and rank not in self._asked}
            failed_at = min(failed_at, now if any(codes) else failed_at)
            saved_at = min(saved_at, now if EXCHANGE_FAILED in codes else saved_at)
            received = interrupts.received[num_seen:]
            num_seen += len(received)
            if num_seen > 1 or now > min(failed_at + KILL_SECONDS, saved_at + SAVED_SECONDS):
                self._asked |= set(range(len(codes)))
                self.kill()
            elif received or now > failed_at + STOP_SECONDS:
                self._ask()
            elif not (self.is_growing or num_seen or any(codes)) and machines.has_more():
                self.is_growing = True
                self._asked.add(0)
                self._workers[0].send_signal(signal.SIGTERM)  # all agree on it at the next border of steps

    def kill(self) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                worker.kill()

    def ends(self, folder: Path) -> list[End]:
        """How each has ended, by its code and by `worker.json` in the run folder, which this process must see."""
        return [self._end(rank, worker, folder) for rank, worker in enumerate(self._workers)]

    def _ask(self) -> None:
        """Ask those that still run to save and end."""
        for rank, worker in enumerate(self._workers):
            if worker.poll() is None and rank not in self._asked:
                self._asked.add(rank)
                worker.send_signal(signal.SIGTERM)

    def _end(self, rank: int, worker: Worker, folder: Path) -> End:
        code = worker.poll()
        assert code is not None, "watched to its end"
        status: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            status = json.loads((folder / RANKS / str(rank) / STATUS).read_text())
        if status.get("process") != worker.pid:  # of an earlier gang
            status = {}
        reason = status.get("reason", "")
        was_lost = rank in self._lost and (code < 0 or (code == 1 and not reason))
        return End(rank=rank, code=code, host=status.get("host", ""), reason=reason, was_lost=was_lost)


def _record(folder: Path, began: float, ends: Sequence[End]) -> None:
    """Append a line to the file of gangs. A disk error costs the line, not the run."""
    values = {"began": began, "seconds": time.time() - began, "workers": [asdict(end) for end in ends]}
    try:
        (folder / RANKS).mkdir(parents=True, exist_ok=True)
        with (folder / RANKS / GANGS).open("a") as file:
            file.write(json.dumps(values) + "\n")
    except OSError as error:
        _say(f"{folder / RANKS / GANGS} cannot be written: {error}")


def _next_resume(resume: str, before: Set[State], now: Set[State]) -> str:
    """The `checkpoint.resume` of a new gang: `auto` once it finds this run's state, until then the command's."""
    goes_on = not before & now if resume == "never" else bool(now - before)
    return "auto" if goes_on else resume


def _states(folder: Path) -> set[State]:
    """The states of training in a run folder, saved by rank 0 or by others."""
    found = [path.stat() for pattern in STATES for path in folder.glob(pattern)]
    return {(status.st_ino, status.st_mtime_ns) for status in found}


def _say(text: str) -> None:
    sys.stderr.write(f"parallm: {text}\n")
    sys.stderr.flush()
