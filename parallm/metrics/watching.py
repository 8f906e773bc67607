"""What the watchers of a process see: its news, the runs that it trains, its pulse, its log."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from parallm.metrics.live_run import LiveRun
from parallm.metrics.news import News
from parallm.metrics.pulse import Pulse
from parallm.metrics.recent_log import RecentLog
from parallm.metrics.run_folders import RunFolders


@dataclass(slots=True, kw_only=True, eq=False)
class Watching:
    """Made before the model is loaded; `open` begins to measure and to keep the log."""

    news: News = field(default_factory=News)
    run_id: str | None = None
    """Id of the run that is in training, `NAME~TIME`; None where nothing is."""
    runs: Mapping[str, LiveRun] = field(default_factory=dict)
    """The policies in training, by name."""
    folders: RunFolders = field(default_factory=lambda: RunFolders(()))
    """Runs on the disk."""
    measure: Callable[[], Mapping[str, Any]] = dict
    """Numbers of each pulse; the server sets it."""
    log: RecentLog = field(init=False)
    pulse: Pulse = field(init=False)

    def __post_init__(self) -> None:
        self.log = RecentLog(self.news)
        self.pulse = Pulse(lambda: self.measure(), self.news)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Measure each second and keep the log, until the end."""
        with self.log.listening():
            pulsing = asyncio.create_task(self.pulse.run(self._tell_statuses))
            try:
                yield
            finally:
                pulsing.cancel()
                with suppress(asyncio.CancelledError):
                    await pulsing

    def _tell_statuses(self) -> None:
        for run in self.runs.values():
            run.tell_status()
