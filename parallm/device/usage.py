"""How busy this process, the machine and the accelerator were in the last second, where the system tells.

Of a CPU: the process's own seconds, and on Linux those of all processes. Of an NVIDIA GPU: what NVML measures. Apple's
GPUs tell it to nobody without root.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx

SECONDS_BETWEEN_LOOKS = 1.0
KERNEL_TICKS = Path("/proc/stat")
NVML = "libnvidia-ml.so.1"

Busy = Callable[[], float]
"""Seconds that something was busy since any moment, as a share of all its processors."""
Usage = Mapping[str, float]
"""Shares from 0 to 1 of the last second: `process` and `machine` of the CPU's cores, and `accelerator`."""


class UsageMonitor:
    """Looks each second, from a thread of its own, between `start` and `stop`. `usage` may be read from any thread."""

    def __init__(self) -> None:
        self._clocks: dict[str, Busy] = {"process": process_seconds}
        if machine_seconds() is not None:
            self._clocks["machine"] = lambda: machine_seconds() or 0.0
        self._accelerator = accelerator_usage()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="usage", daemon=True)
        self.usage: Usage = {}  # written by the thread alone, whole

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look(self) -> None:
        then, before = time.monotonic(), {name: clock() for name, clock in self._clocks.items()}
        while not self._ended.wait(SECONDS_BETWEEN_LOOKS):
            now, busy = time.monotonic(), {name: clock() for name, clock in self._clocks.items()}
            found = {name: _share(busy[name] - before[name], now - then) for name in busy}
            accelerator = self._accelerator()
            self.usage = found if accelerator is None else {**found, "accelerator": accelerator}
            then, before = now, busy


def process_seconds() -> float:
    return time.process_time() / (os.cpu_count() or 1)


def machine_seconds() -> float | None:
    """Of all processes; None where the system does not tell."""
    try:
        ticks = [int(number) for number in KERNEL_TICKS.read_text().partition("\n")[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    idle = sum(ticks[3:5])  # and waiting for a disk
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


def accelerator_usage() -> Callable[[], float | None]:
    """Reads the share of the last moment in which the default GPU was busy; None where that cannot be read."""
    if mx.default_device() == mx.Device(mx.cpu):
        return lambda: None
    try:
        library = ctypes.CDLL(NVML)
    except OSError:
        return lambda: None
    handle = ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(_first_visible(), ctypes.byref(handle)):
        return lambda: None

    def read() -> float | None:
        percents = (ctypes.c_uint * 2)()  # of the processors, of the memory's bus
        return None if library.nvmlDeviceGetUtilizationRates(handle, percents) else percents[0] / 100

    return read


def _first_visible() -> int:
    """NVML's number of the GPU that CUDA calls 0."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    return int(first) if first.isdecimal() else 0


def _share(busy: float, seconds: float) -> float:
    return min(1.0, max(0.0, busy / max(seconds, 1e-9)))
