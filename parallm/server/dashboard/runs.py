"""The runs that the page may read: the one in training, by `current` or by its id, and those on the disk."""

from collections.abc import Callable
from typing import TypeVar

from parallm.errors import UnknownModel, UnknownObject
from parallm.metrics.history import View
from parallm.metrics.live_run import LiveRun
from parallm.metrics.recent_log import LogLine
from parallm.metrics.run_files import Row, RunFolder
from parallm.metrics.run_folders import RunFolders
from parallm.metrics.watching import Watching
from parallm.server.request_limits import WorkerPool

CURRENT = "current"
Result = TypeVar("Result")


def live_run(watching: Watching, policy: str | None) -> LiveRun | None:
    """Return the policy in training, the first one without a name; None where nothing trains. Raises UnknownModel."""
    if not watching.runs:
        return None
    if policy is None:
        return next(iter(watching.runs.values()))
    if policy not in watching.runs:
        raise UnknownModel(f"no policy {policy[:100]!r} is trained here; there are {', '.join(watching.runs)}")
    return watching.runs[policy]


class Runs:
    """Reads runs on threads of its own, so that it keeps no request of a client waiting."""

    def __init__(self, watching: Watching) -> None:
        self._watching = watching
        self._readers = WorkerPool()

    @property
    def folders(self) -> RunFolders:
        return self._watching.folders

    @property
    def run_id(self) -> str | None:
        """Id of the run in training."""
        return self._watching.run_id

    def recent_lines(self) -> list[LogLine]:
        """Return the newest lines of this process's log."""
        return self._watching.log.lines()

    async def read(self, function: Callable[[], Result]) -> Result:
        """Return `function()`, from one of the threads. Raises what it raises."""
        return await self._readers.run(function)

    def live(self, run: str, policy: str | None) -> LiveRun | None:
        """Return the policy in training that `run` names; None for another run. Raises UnknownModel, UnknownObject."""
        if run != CURRENT and run != self._watching.run_id:
            return None
        found = live_run(self._watching, policy)
        if found is None:
            raise UnknownObject("nothing is trained here, so there is no current run; GET /v1/runs lists others")
        return found

    def folder(self, run: str, policy: str | None) -> RunFolder:
        """Return the folder of a run's policy. For threads. Raises UnknownObject, UnknownModel."""
        if (live := self.live(run, policy)) is not None and live.folder is not None:
            return RunFolder(live.folder)
        return self.folders.folder(run, policy)

    async def view(self, run: str, policy: str | None) -> View:
        """Return the history of a run. Raises UnknownObject, UnknownModel, RunUnreadable."""
        if (live := self.live(run, policy)) is not None:
            return live.history.view()
        return await self.read(lambda: self.folders.history(self.folder(run, policy)).view())

    def rows(self, limit: int, after: str | None) -> tuple[list[Row], str | None]:
        """Return runs as lists show them, and the id after which there are more. For threads. Raises UnknownObject."""
        folders = list(self.folders.folders().items())
        if after is not None:
            begin = next((index + 1 for index, (run, _) in enumerate(folders) if run == after), None)
            if begin is None:
                raise UnknownObject(f"no run {after[:200]!r} after which others come")
            folders = folders[begin:]
        rows = [self.row(run, folder) for run, folder in folders[:limit]]
        return rows, rows[-1]["id"] if len(folders) > limit else None

    def row(self, run: str, folder: RunFolder) -> Row:
        """Return one of these rows; that of the run in training has the state of its trainers."""
        row = self.folders.row(run, folder)
        lives = list(self._watching.runs.values()) if run == self._watching.run_id else []
        if lives:
            statuses = [live.status() for live in lives]
            is_ended = all(status.state in ("finished", "failed") for status in statuses)
            state = "failed" if any(status.state == "failed" for status in statuses) else "finished"
            row |= {
                "state": state if is_ended else "running",
                "step": max(status.step for status in statuses),
                "total_steps": max(status.total_steps for status in statuses),
                "ended": row["ended"] if is_ended else None,
                "policies": [live.policy for live in lives] if len(lives) > 1 else [],
            }
        return {**row, "is_current": bool(lives)}
