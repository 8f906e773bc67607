"""Use of the CPU and the accelerator in the last second, and the report about the device for a server.

CPU use is measured for this process, and on Linux for all processes; the use of an NVIDIA GPU is what NVML measures.
macOS shows the use of its GPU to root alone, so it is left out.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx

from parallm.device.governor import Governor

INTERVAL_SECONDS = 1.0
KERNEL_TICKS = Path("/proc/stat")
NVML = "libnvidia-ml.so.1"

Busy = Callable[[], float]
"""Returns busy seconds since a fixed moment, divided by the number of cores."""
Usage = Mapping[str, float]
"""Shares of the last second from 0 to 1: `process` and `machine` for the CPU's cores, and `accelerator`."""


class UsageMonitor:
    """Measures once a second in a thread between `start` and `stop`. Any thread may read `usage`."""

    def __init__(self) -> None:
        self._clocks: dict[str, Busy] = {"process": process_seconds}
        if machine_seconds() is not None:
            self._clocks["machine"] = lambda: machine_seconds() or 0.0
        self._accelerator = accelerator_usage()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="usage", daemon=True)
        self.usage: Usage = {}  # replaced as a whole by the thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _measure(self) -> None:
        then, before = time.monotonic(), {name: clock() for name, clock in self._clocks.items()}
        while not self._ended.wait(INTERVAL_SECONDS):
            now, busy = time.monotonic(), {name: clock() for name, clock in self._clocks.items()}
            shares = {name: _share(busy[name] - before[name], now - then) for name in busy}
            accelerator = self._accelerator()
            self.usage = shares if accelerator is None else {**shares, "accelerator": accelerator}
            then, before = now, busy


def process_seconds() -> float:
    return time.process_time() / (os.cpu_count() or 1)


def machine_seconds() -> float | None:
    """Return the busy seconds of all processes; None where /proc/stat is missing."""
    try:
        ticks = [int(number) for number in KERNEL_TICKS.read_text().partition("\n")[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    idle = sum(ticks[3:5])  # idle and waiting for a disk
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


def accelerator_usage() -> Callable[[], float | None]:
    """Return a reader of the utilization of the default GPU, which returns None where NVML is missing."""
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
    """Return NVML's index of the GPU that CUDA calls 0."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    return int(first) if first.isdecimal() else 0


def _share(busy: float, seconds: float) -> float:
    return min(1.0, max(0.0, busy / max(seconds, 1e-9)))


class DeviceReport:
    """Time, memory, use and shares of the device for a server. For any thread."""

    def __init__(self, governor: Governor, monitor: UsageMonitor) -> None:
        self._governor = governor
        self._monitor = monitor

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds since the start by kind of work."""
        return {str(work): seconds for work, seconds in self._governor.seconds.items()}

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of MLX's arrays: `active`, at their `peak`, and freed ones in the `cache`."""
        return {"active": mx.get_active_memory(), "peak": mx.get_peak_memory(), "cache": mx.get_cache_memory()}

    def usage(self) -> Usage:
        return self._monitor.usage

    def shares(self) -> Mapping[str, float]:
        """Return `serving_share`, `engine_share` and, if there is one, `serving_latency_target` of `DeviceSettings`."""
        target = self._governor.serving_latency_target
        shares = {"serving_share": self._governor.serving_share, "engine_share": self._governor.engine_share}
        return shares if target is None else {**shares, "serving_latency_target": target}

    def set_shares(
        self, *, serving_share: float | None, engine_share: float | None, serving_latency_target: float | None
    ) -> None:
        """Change settings from the next unit of work on; None leaves one as it is, a target of 0 ends the target."""
        if serving_share is not None:
            self._governor.serving_share = serving_share
        if engine_share is not None:
            self._governor.engine_share = engine_share
        if serving_latency_target is not None:
            self._governor.serving_latency_target = serving_latency_target or None
