"""Time, memory and use of the device."""

from collections.abc import Mapping

import mlx.core as mx

from parallm.device.governor import Governor
from parallm.device.usage import Usage, UsageMonitor


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
        """Return `serving_share` and `engine_share`; see `DeviceSettings`."""
        return {"serving_share": self._governor.serving_share, "engine_share": self._governor.engine_share}

    def set_shares(self, *, serving_share: float | None, engine_share: float | None) -> None:
        """Change shares from the next unit of work on; None leaves a share as it is."""
        if serving_share is not None:
            self._governor.serving_share = serving_share
        if engine_share is not None:
            self._governor.engine_share = engine_share
