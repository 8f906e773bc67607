"""Starts the workers of a run on the nodes of a Ray cluster, and starts them again when one is lost.

Ray places, watches and isolates: an actor, a `Seat`, holds the place of a worker (a core, and a GPU where the cluster
has some), and starts a process in it for each gang. The processes are those that a launcher starts, and know nothing of
Ray. A seat that has no node yet stays asked for: when a node comes late, a larger gang is started at the next
evaluation, or after `distributed.rejoin_seconds`. The one module that imports Ray.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # the system kills what uses too much, with a better choice

if (Path.home() / ".ray" / "auth_token").is_file():  # clusters then ask for it, and those who join do not send it
    os.environ.setdefault("RAY_AUTH_MODE", "token")

import ray
from ray.exceptions import RayError

from parallm.distributed.gang import Front, Interrupts, free_ports, ring_hosts, run_gangs, variables
from parallm.distributed.identity import Backend
from parallm.distributed.launcher import LOOPBACK, backend_of
from parallm.distributed.settings import DistributedSettings
from parallm.errors import ConfigError, ExchangeFailed

EVALUATIONS = "evaluations.jsonl"
OBJECT_STORE_BYTES = 100 << 20
"""Memory of a local cluster for objects: nothing large goes through Ray."""
GRACE_SECONDS = 5.0
"""Time for more seats once there are `distributed.min_workers`."""
REPORT_SECONDS = 1.0
CONNECT_SECONDS = 10.0
POLL_SECONDS = 0.1
OUTPUT_BYTES = 1 << 16
AS_WORKER = ("distributed.engine=mlx", "distributed.min_workers=null", "distributed.address=null")
"""Keys of a worker: none of Ray's."""


def conduct(
    settings: DistributedSettings,
    command: Sequence[str],
    folder: Path,
    resume: str,
    interrupts: Interrupts,
    front: Front,
) -> int:
    """Run Python with the arguments `command` as gangs of workers, behind `front`; return the exit code.

    Raises ConfigError for a cluster that does not answer.
    """
    backend_of(settings)  # refuses what Ray cannot start
    try:
        _connect(settings)
    except (RayError, OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"distributed.address={settings.address}: no Ray cluster answers ({_first_line(error)}); start one by `ray "
            "start --head`, with the same ~/.ray/auth_token on every node, or leave the address out"
        ) from error
    try:
        with interrupts.counted():  # after ray.init, which sets a handler of its own
            cluster = Cluster(settings, command, folder.absolute(), interrupts, front)
            return run_gangs(cluster, settings, folder, resume=resume, interrupts=interrupts)
    finally:
        ray.shutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The node and devices of a seat."""

    host: str
    """Address of the node."""
    name: str
    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names those of this seat."""
    backend: Backend


class Seat:
    """An actor: the place of one worker. Its process dies with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="parallm-")

    def place(self, settings: DistributedSettings) -> Place:
        """Return where this seat is."""
        gpus = tuple(name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name)
        address = ray.util.get_node_ip_address()
        return Place(host=address, name=socket.gethostname(), gpus=gpus, backend=backend_of(settings))

    def ports(self, host: str, count: int) -> list[int]:
        return free_ports(host, count)

    def start(self, command: Sequence[str], values: Mapping[str, str], hosts: str, folder: str) -> int:
        """Start a worker in `folder` with further variables, return its process. Raises OSError.

        `hosts`: the content of the file of MLX_HOSTFILE; empty if there is none.
        """
        environment = {**os.environ, **values}
        if "OMP_NUM_THREADS" not in values:
            environment.pop("OMP_NUM_THREADS", None)  # Ray's: the cores that the actor has booked
        if hosts:
            path = Path(self._folder.name) / "hosts.json"
            path.write_text(hosts)
            environment["MLX_HOSTFILE"] = str(path)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's processes block some, and children inherit that
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return self._process.pid

    def report(self, evaluations: str, seconds: float) -> tuple[bytes, int | None, int]:
        """Wait for something to tell: return new output, the exit code or None, and the size of a file."""
        process = self._process
        assert process is not None, "started"
        assert process.stdout is not None, "a pipe"
        readable, _, _ = select.select([process.stdout], [], [], seconds)
        output = os.read(process.stdout.fileno(), OUTPUT_BYTES) if readable else b""
        code = process.poll()
        if readable and not output and code is None:  # closed; it is about to end
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        size = Path(evaluations).stat().st_size if Path(evaluations).exists() else 0
        return output, None if output else code, size

    def send_signal(self, number: int) -> None:
        assert self._process is not None, "started"
        self._process.send_signal(number)


class SeatedWorker:
    """The process of a seat, seen from the conductor."""

    def __init__(self, seat: Any, pid: int, evaluations: Path, silence_seconds: float) -> None:
        """`silence_seconds`: the longest time without a report; then the seat is given up."""
        self.pid = pid
        self.evaluated = 0
        """Size of the file of evaluations on the worker's node."""
        self._seat = seat
        self._evaluations = str(evaluations)
        self._silence_seconds = silence_seconds
        self._code: int | None = None
        self._ask()

    def poll(self) -> int | None:
        """Return the exit code, once all output is shown; None while the process runs."""
        while self._code is None and ray.wait([self._report], timeout=0)[0]:
            try:
                output, self._code, self.evaluated = ray.get(self._report)
            except RayError:  # the actor is dead, or its node
                self._code = -signal.SIGKILL
                break
            sys.stdout.buffer.write(output)
            sys.stdout.flush()
            self._ask()
        if self._code is None and time.monotonic() > self._asked + self._silence_seconds:
            ray.kill(self._seat)
            self._code = -signal.SIGKILL
        return self._code

    def send_signal(self, sig: int) -> None:
        self._seat.send_signal.remote(sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ask(self) -> None:
        self._asked = time.monotonic()
        self._report = self._seat.report.remote(self._evaluations, REPORT_SECONDS)


class Cluster:
    """The seats of a run on a Ray cluster, which this process has joined."""

    def __init__(
        self,
        settings: DistributedSettings,
        command: Sequence[str],
        folder: Path,
        interrupts: Interrupts,
        front: Front,
    ) -> None:
        assert settings.workers is not None, "checked with the configuration"
        self._front = front
        self._settings = settings
        self._command = command
        self._evaluations = folder / EVALUATIONS
        self._interrupts = interrupts
        self._wanted = settings.workers
        self._needed = settings.min_workers or settings.workers
        self._num_gpus = int(settings.backend != "ring" and ray.cluster_resources().get("GPU", 0) > 0)
        self._seat_type = ray.remote(Seat).options(num_cpus=1, num_gpus=self._num_gpus, max_concurrency=4)
        self._asked: dict[Any, Any] = {}  # seats by the reference to their place
        self._seats: list[tuple[Place, Any]] = []
        self._workers: list[SeatedWorker] = []
        self._late: tuple[float, int] | None = None  # since when there are more seats, and what was evaluated then

    def start(self, overrides: Sequence[str]) -> list[SeatedWorker]:
        """Start a worker in each seat. Raises ExchangeFailed if there are too few in time."""
        self._late = None
        self._wait_for_seats()
        # neighbours in the ring are neighbours on a node, and ranks stay where they are
        self._seats.sort(key=lambda seated: (seated[0].host, seated[0].gpus))
        places, seats = [place for place, _ in self._seats], [seat for _, seat in self._seats]
        backend = places[0].backend
        try:
            ports = ray.get([seat.ports.remote(place.host, 3) for place, seat in self._seats])
            hosts = [place.host for place in places]
            own = variables(backend, hosts, [port for port, *_ in ports], ports[0][1])
            ring = ring_hosts(hosts, [port for port, *_ in ports]) if backend == "ring" else ""
            # other machines reach a node's address, so that the workers there need keys
            listening = [LOOPBACK] * len(hosts) if self._settings.address is None else hosts
            addresses = self._front.assign(listening, [port for *_, port in ports])
            more = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]} if "OMP_NUM_THREADS" in os.environ else {}
            command = [*self._command, *AS_WORKER, f"distributed.workers={len(seats)}", *overrides]
            starts = [
                seat.start.remote(command, values | address | more, ring, str(Path.cwd()))
                for seat, values, address in zip(seats, own, addresses, strict=True)
            ]
            pids = ray.get(starts)
        except RayError as error:
            raise ExchangeFailed(f"a worker cannot be started: {_first_line(error)}") from error
        silence = self._settings.timeout_seconds
        self._workers = [
            SeatedWorker(seat, pid, self._evaluations, silence) for seat, pid in zip(seats, pids, strict=True)
        ]
        return self._workers

    def has_more(self) -> bool:
        self._arrive()
        if len(self._seats) <= len(self._workers):
            return False
        evaluated, now = self._workers[0].evaluated, time.monotonic()
        self._late = self._late or (now, evaluated)
        since, before = self._late
        return evaluated != before or now > since + self._settings.rejoin_seconds

    def _wait_for_seats(self) -> None:
        began, was_shown = time.monotonic(), False
        self._drop_lost()
        while (count := len(self._seats)) < self._wanted:
            for _ in range(self._wanted - count - len(self._asked)):
                seat = self._seat_type.remote()
                self._asked[seat.place.remote(self._settings)] = seat
            waited = time.monotonic() - began
            if count >= self._needed and waited > GRACE_SECONDS:
                return
            if self._interrupts.received or waited > self._settings.timeout_seconds:
                raise ExchangeFailed(f"{self._missing()}, after {waited:.0f} s (distributed.timeout_seconds)")
            if waited > GRACE_SECONDS and not was_shown:
                was_shown = True
                sys.stderr.write(f"parallm: {self._missing()}; waiting for nodes to join the cluster\n")
            self._arrive(POLL_SECONDS)

    def _arrive(self, seconds: float = 0.0) -> None:
        """Take the seats that have found a node by now."""
        if not self._asked:
            return
        found, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=seconds)
        for reference in found:
            seat = self._asked.pop(reference)
            with suppress(RayError):  # lost before it began
                self._seats.append((ray.get(reference), seat))

    def _drop_lost(self) -> None:
        """Give up seats whose actor or node is gone."""
        answers = [(seated, seated[1].ports.remote(seated[0].host, 0)) for seated in self._seats]
        found, _ = ray.wait([one for _, one in answers], num_returns=len(answers), timeout=GRACE_SECONDS)
        self._seats = []
        for seated, answer in answers:
            with suppress(RayError):
                if answer in found and ray.get(answer) == []:
                    self._seats.append(seated)
                    continue
            ray.kill(seated[1])

    def _missing(self) -> str:
        total, free = ray.cluster_resources(), ray.available_resources()
        listed = [f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}s are free" for name in ("CPU", "GPU")]
        return (
            f"distributed.workers={self._wanted}: Ray has a place for {len(self._seats)} of at least {self._needed} "
            f"workers; each needs a core{' and a GPU' * self._num_gpus}, and {', '.join(listed)}"
        )


def _connect(settings: DistributedSettings) -> None:
    """Start a cluster, or join one. Raises OSError and others that Ray raises."""
    host, _, port = (settings.address or "").rpartition(":")
    if host and port.isdigit():  # Ray itself tries for minutes
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    if settings.address is None:
        cores = max(os.cpu_count() or 1, settings.workers or 1)  # workers on one machine divide its cores
        options |= {"num_cpus": cores, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    ray.init(address=settings.address or "local", **options)


def _first_line(error: BaseException) -> str:
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
