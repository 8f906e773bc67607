"""Starts the workers of a run on this machine and ends with their exit code. Imports no MLX.

`mlx.launch` does it over ssh, for several machines and for Macs, and ends with 0 whatever its processes ended with.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pkgutil import resolve_name

from parallm.distributed.children import start
from parallm.distributed.gang import Front, Interrupts, NoFront, free_ports, ring_hosts, run_gangs, variables
from parallm.distributed.identity import Backend, identity_of
from parallm.distributed.settings import DistributedSettings
from parallm.errors import ConfigError
from parallm.server.settings import ServerSettings

CUDA_PACKAGES = ("mlx-cuda-12", "mlx-cuda-13")
LOOPBACK = "127.0.0.1"
CONDUCTOR = "parallm.distributed.conductor:conduct"
FRONT = "parallm.distributed.front.process:standing_front"
"""Imported when it is needed: a server is not loaded in a tenth of a second."""


def must_launch(settings: DistributedSettings) -> bool:
    """Whether this process is to start the workers instead of being one. Raises ConfigError."""
    several = settings.engine == "ray" or (settings.workers or 1) > 1
    return settings.engine != "off" and several and identity_of() is None


def launch(
    settings: DistributedSettings, server: ServerSettings, arguments: Sequence[str], folder: Path, resume: str
) -> int:
    """Run this command as `settings.workers` processes, here or by Ray, behind a front. Returns the exit code.

    `folder` is that of the run, `resume` the `checkpoint.resume` of the command. Raises ConfigError if this machine has
    fewer GPUs, ListenError.
    """
    command = ["-m", "parallm.train", *arguments, f"hydra.run.dir={folder}"]
    interrupts, standing_front = Interrupts(), resolve_name(FRONT)
    if settings.engine == "ray":
        try:
            conduct = resolve_name(CONDUCTOR)
        except ModuleNotFoundError as error:
            raise ConfigError(f"distributed=ray needs Ray: pip install 'parallm[ray]' ({error})") from error
        with standing_front(server, settings.front, interrupts) as front:
            return conduct(settings, command, folder, resume, interrupts, front)
    with (
        standing_front(server, settings.front, interrupts) as front,
        tempfile.TemporaryDirectory(prefix="parallm-") as temporary,
        interrupts.counted(),
    ):
        host = Host(settings, command, Path(temporary) / "hosts.json", front)
        return run_gangs(host, settings, folder, resume=resume, interrupts=interrupts)


def launch_ranks(settings: DistributedSettings, arguments: Sequence[str], folder: Path) -> int:
    """Serve as `settings.workers` processes here, each with a part of the base. Returns the exit code.

    `folder` is that of the server. Raises ConfigError if this machine has fewer GPUs.
    """
    interrupts = Interrupts()
    with tempfile.TemporaryDirectory(prefix="parallm-") as temporary, interrupts.counted():
        host = Host(settings, ["-m", "parallm.serve", *arguments], Path(temporary) / "hosts.json", NoFront())
        return run_gangs(host, settings, folder, resume="never", interrupts=interrupts)


class Host:
    """This machine: gangs of one size, with a GPU for each worker or a share of the cores."""

    def __init__(self, settings: DistributedSettings, command: Sequence[str], hosts_file: Path, front: Front) -> None:
        """`command`: the arguments of Python."""
        self._front = front
        self._count = settings.workers or 1
        self._command = command
        self._hosts_file = hosts_file
        self._backend = backend_of(settings)
        self._devices = devices() if self._backend == "nccl" else []
        if self._backend == "nccl" and len(self._devices) < self._count:
            raise ConfigError(
                f"distributed.workers={self._count}: NCCL needs a GPU for each, and this process sees "
                f"{len(self._devices)}"
            )

    def start(self, overrides: Sequence[str]) -> list[subprocess.Popen[bytes]]:
        hosts, ports = [LOOPBACK] * self._count, free_ports(LOOPBACK, 2 * self._count + 1)
        http, ports = ports[: self._count], ports[self._count :]
        own = variables(self._backend, hosts, ports[:-1], ports[-1])
        for rank, (values, address) in enumerate(zip(own, self._front.assign(hosts, http), strict=True)):
            values |= address
            if self._backend == "nccl":
                values["CUDA_VISIBLE_DEVICES"] = self._devices[rank]
            else:
                values["MLX_HOSTFILE"] = str(self._hosts_file)
        self._hosts_file.write_text(ring_hosts(hosts, ports[:-1]))
        command = [sys.executable, *self._command, *overrides]
        return [start(command, values) for values in own]

    def has_more(self) -> bool:
        return False


def backend_of(settings: DistributedSettings) -> Backend:
    """The library that sums gradients between workers with the Python of this process. Raises ConfigError."""
    if settings.backend == "jaccl":
        raise ConfigError("distributed.backend=jaccl: Macs are started by mlx.launch --backend jaccl --hostfile FILE")
    if settings.backend == "auto":
        return "nccl" if has_cuda() else "ring"
    return settings.backend


def has_cuda() -> bool:
    """Whether MLX's CUDA build is installed."""
    for name in CUDA_PACKAGES:
        with suppress(PackageNotFoundError):
            return bool(version(name))
    return False


def devices() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
