"""Several servers of one model on this machine behind a front, each started again when it ends. Imports no MLX."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pkgutil import resolve_name

from parallm.distributed.children import start
from parallm.distributed.gang import INTERRUPTED, POLL_SECONDS, SIGNALLED, Interrupts, free_ports
from parallm.distributed.identity import LISTEN, REPLICA
from parallm.distributed.launcher import FRONT, LOOPBACK, devices, has_cuda
from parallm.distributed.settings import ServingSettings
from parallm.distributed.team import available_cores
from parallm.errors import ConfigError
from parallm.server.settings import ServerSettings

MAX_FAILED = 3
"""Times in a row that a server may be killed before it has been ready; then all end."""
SECONDS_BETWEEN_LOOKS, LOOK_SECONDS = 1.0, 0.2


def must_start_servers(settings: ServingSettings) -> bool:
    """Whether this process is to start servers instead of being one."""
    return settings.workers > 1 and REPLICA not in os.environ


def run_servers(settings: ServingSettings, server: ServerSettings, arguments: Sequence[str]) -> int:
    """Run `parallm.serve` with these arguments `settings.workers` times until a signal. Returns the exit code.

    Raises ConfigError if this machine has fewer GPUs or there is to be no front, ListenError.
    """
    count = settings.workers
    if not (server.enabled and settings.front.enabled):
        raise ConfigError(
            f"distributed.workers={count}: several servers need the front before them; set server.enabled=true and "
            "distributed.front.enabled=true, or distributed.workers=1"
        )
    if settings.tensor_parallel > 1:
        raise ConfigError(
            f"distributed.workers={count} distributed.tensor_parallel={settings.tensor_parallel}: start each divided "
            "server by itself, and parallm.front before them"
        )
    gpus = devices() if has_cuda() else []
    if has_cuda() and len(gpus) < count:
        raise ConfigError(f"distributed.workers={count}: each needs a GPU, and this process sees {len(gpus)}")
    command = [sys.executable, "-m", "parallm.serve", *arguments]
    interrupts, standing_front = Interrupts(), resolve_name(FRONT)
    with standing_front(server, settings.front, interrupts) as front, interrupts.counted():
        servers = []
        for rank, address in enumerate(front.assign([LOOPBACK] * count, free_ports(LOOPBACK, count))):
            own = {REPLICA: str(rank), **address} | ({"CUDA_VISIBLE_DEVICES": gpus[rank]} if gpus else {})
            servers.append(Started(rank, command, own, [] if gpus else cores_of(rank, count)))
        try:
            code = keep_running(servers, interrupts)
            return INTERRUPTED if has_to_be_killed(servers, interrupts) else code
        finally:
            for one in servers:
                one.process.kill()
                one.process.wait()


class Started:
    """One server's process, the present one."""

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], cores: Sequence[int] = ()
    ) -> None:
        """`environment` has its address. `cores`: numbers of those that it is to use; none: all."""
        self.rank = rank
        self._command = command
        self._environment = environment
        self._cores = cores
        self._num_failed = 0
        self.start()

    def start(self) -> None:
        self._was_ready = False
        self._looked = time.monotonic()
        self.process = start(self._command, self._environment)
        if self._cores:
            with suppress(OSError):
                os.sched_setaffinity(self.process.pid, self._cores)

    def keep(self) -> int | None:
        """Start it again if it has ended. Return its exit code if that would end in the same way."""
        code = self.process.poll()
        if code is None:
            self._look()
            return None
        self._num_failed = 0 if self._was_ready else self._num_failed + 1
        if self._num_failed and (code >= 0 or self._num_failed == MAX_FAILED):
            return SIGNALLED - code if code < 0 else code
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        sys.stderr.write(f"parallm: server {self.rank} {how} and is started again\n")
        self.start()
        return None

    def _look(self) -> None:
        """Note once it is ready: a server that ends before has a reason that stays."""
        if self._was_ready or time.monotonic() < self._looked + SECONDS_BETWEEN_LOOKS:
            return
        self._looked = time.monotonic()
        connection = HTTPConnection(self._environment[LISTEN], timeout=LOOK_SECONDS)
        with closing(connection), suppress(OSError, HTTPException):
            connection.request("GET", "/ready")
            self._was_ready = connection.getresponse().status == HTTPStatus.OK


def keep_running(servers: Sequence[Started], interrupts: Interrupts) -> int:
    """Return 0 after a signal, and the exit code of a server that cannot be started."""
    while not interrupts.received:
        time.sleep(POLL_SECONDS)
        for one in servers:
            if (code := one.keep()) is not None:
                return code
    return 0


def has_to_be_killed(servers: Sequence[Started], interrupts: Interrupts) -> bool:
    """Let all answer what they have begun, and end. Return whether a second signal came before."""
    for one in servers:
        one.process.terminate()
    while any(one.process.poll() is None for one in servers):
        time.sleep(POLL_SECONDS)
        if len(interrupts.received) > 1:
            return True
    return False


def cores_of(rank: int, count: int) -> list[int]:
    """A server's share of the cores, as workers of a run divide them."""
    cores = available_cores()
    share = len(cores) // count
    return cores[rank * share : (rank + 1) * share]
