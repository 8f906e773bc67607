"""Starts the workers of a run on this machine and ends with their exit code. Imports no MLX.

`mlx.launch` does it over ssh, for several machines and for Macs, and ends with 0 whatever its processes ended with.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from parallm.distributed.identity import COORDINATOR, identity_of
from parallm.distributed.settings import DistributedSettings
from parallm.distributed.team import EXCHANGE_FAILED
from parallm.errors import ConfigError

CUDA_PACKAGES = ("mlx-cuda-12", "mlx-cuda-13")
STOP_SECONDS = 2.0
"""Time after a failure until the other workers get SIGTERM: those that have joined know it by then, and save."""
KILL_SECONDS = 120.0
"""Time after a failure until the other workers are killed."""
POLL_SECONDS = 0.1
SIGNALLED = 128
"""Exit code of a process that a signal killed, less the signal's number, as shells count."""


def must_launch(settings: DistributedSettings) -> bool:
    """Whether this process is to start the workers instead of being one. Raises ConfigError."""
    return settings.engine != "off" and (settings.workers or 1) > 1 and identity_of() is None


def launch(settings: DistributedSettings, module: str, arguments: Sequence[str], folder: Path) -> int:
    """Run a command as `settings.workers` processes. Returns the exit code of the one that failed first, else 0.

    `module` and `arguments` are the command's, `folder` is that of the run. Raises ConfigError if this machine has
    fewer GPUs.
    """
    count = settings.workers or 1
    with tempfile.TemporaryDirectory(prefix="parallm-") as temporary:
        environments = _environments(settings, count, Path(temporary))
        command = [sys.executable, "-m", module, *arguments]
        processes = [subprocess.Popen(command, env=os.environ | own) for own in environments]
        forwarded = _forward_signals(processes)
        try:
            return _watch(processes, folder)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for number, handler in forwarded.items():
                signal.signal(number, handler)


def _environments(settings: DistributedSettings, count: int, temporary: Path) -> list[dict[str, str]]:
    """The variables of mx.distributed and of the channel for each rank."""
    ports = _free_ports(count + 1)
    usual = {COORDINATOR: f"127.0.0.1:{ports[-1]}"}
    if settings.backend == "nccl" or (settings.backend == "auto" and _has_cuda()):
        devices = _devices()
        if len(devices) < count:
            raise ConfigError(
                f"distributed.workers={count}: NCCL needs a GPU for each, and this process sees {len(devices)}"
            )
        shared = usual | {
            "NCCL_HOST_IP": "127.0.0.1",
            "NCCL_PORT": str(ports[0]),
            "MLX_WORLD_SIZE": str(count),
            "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0"),  # not every host allows multicast
        }
        return [shared | {"MLX_RANK": str(rank), "CUDA_VISIBLE_DEVICES": devices[rank]} for rank in range(count)]
    if settings.backend == "jaccl":
        raise ConfigError("distributed.backend=jaccl: Macs are started by mlx.launch --backend jaccl --hostfile FILE")
    hosts = temporary / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports[:count]]))
    return [usual | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)} for rank in range(count)]


def _watch(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> int:
    """Wait for all; once one has failed the others have some time to save. Returns the exit code."""
    failed_at: float | None = None
    is_told = False
    while any(process.poll() is None for process in processes):
        time.sleep(POLL_SECONDS)
        if failed_at is None:
            failed_at = time.monotonic() if any(process.returncode for process in processes) else None
            continue
        if time.monotonic() > failed_at + KILL_SECONDS:
            _send(processes, signal.SIGKILL)
        elif not is_told and time.monotonic() > failed_at + STOP_SECONDS:
            is_told = True  # a second one would end them without saving
            _send(processes, signal.SIGTERM)
    codes = [process.returncode for process in processes]
    if not any(codes):
        return 0
    sys.stderr.write(f"parallm: {_told(codes)}; each one's reason is in {folder}/ranks/RANK/worker.json\n")
    # the cause, not the workers that have lost it
    first = next((code for code in codes if code not in (0, EXCHANGE_FAILED)), EXCHANGE_FAILED)
    return SIGNALLED - first if first < 0 else first


def _told(codes: Sequence[int]) -> str:
    return ", ".join(
        f"rank {rank} " + (f"was killed by signal {-code}" if code < 0 else f"ended with {code}")
        for rank, code in enumerate(codes)
    )


def _forward_signals(processes: Sequence[subprocess.Popen[bytes]]) -> Mapping[int, Any]:
    """Hand SIGTERM to all workers. Ctrl-C reaches them by itself, from the terminal."""

    return {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, _: _send(processes, number)),
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
    }


def _send(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            process.send_signal(number)


def _free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nothing listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _has_cuda() -> bool:
    for name in CUDA_PACKAGES:
        with suppress(PackageNotFoundError):
            return bool(version(name))
    return False


def _devices() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
