"""Time, memory and use of the device for a server, and the shares that it may change while the process runs."""

from collections.abc import Mapping

import mlx.core as mx

from parallm.device.governor import Governor
from parallm.device.usage import Usage, UsageMonitor


class DeviceReport:
    """Reads counters, which any thread may."""

    def __init__(self, governor: Governor, monitor: UsageMonitor) -> None:
        self._governor = governor
        self._monitor = monitor

    def seconds(self) -> Mapping[str, float]:
        """Seconds by kind of work, since the start."""
        return {str(work): seconds for work, seconds in self._governor.seconds.items()}

    def memory(self) -> Mapping[str, int]:
        """Bytes of MLX's arrays: `active` now, at their `peak`, and freed ones that it keeps as a `cache`."""
        return {"active": mx.get_active_memory(), "peak": mx.get_peak_memory(), "cache": mx.get_cache_memory()}

    def usage(self) -> Usage:
        return self._monitor.usage

    def shares(self) -> Mapping[str, float]:
        """Return `serving_share` and `engine_share`, as the settings of these names define them."""
        return {"serving_share": self._governor.serving_share, "engine_share": self._governor.engine_share}

    def set_shares(self, *, serving_share: float | None, engine_share: float | None) -> None:
        """Change shares from the next unit of work on; None leaves a share as it is."""
        if serving_share is not None:
            self._governor.serving_share = serving_share
        if engine_share is not None:
            self._governor.engine_share = engine_share
