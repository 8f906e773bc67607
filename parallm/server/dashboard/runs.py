"""The runs that the page may read: the one in training, by `current` or by its id."""

from parallm.errors import UnknownModel, UnknownObject
from parallm.metrics.history import View
from parallm.metrics.live_run import LiveRun
from parallm.metrics.rollout_folder import RolloutFolder
from parallm.metrics.watching import Watching

CURRENT = "current"


def live_run(watching: Watching, policy: str | None) -> LiveRun | None:
    """Return the policy in training, the first one without a name; None where nothing trains. Raises UnknownModel."""
    if not watching.runs:
        return None
    if policy is None:
        return next(iter(watching.runs.values()))
    if policy not in watching.runs:
        raise UnknownModel(f"no policy {policy[:100]!r} is trained here; there are {', '.join(watching.runs)}")
    return watching.runs[policy]


def history_of(watching: Watching, run: str, policy: str | None) -> View:
    """Return the history of a run. Raises UnknownObject, UnknownModel."""
    found = live_run(watching, policy) if run in (CURRENT, watching.run_id) else None
    if found is None:
        raise UnknownObject(f"no run {run[:200]!r}; GET /v1/runs lists those that can be read")
    return found.history.view()


def rollouts_of(watching: Watching, run: str, policy: str | None) -> RolloutFolder:
    """Return the completions of a run. Raises UnknownObject, UnknownModel."""
    found = live_run(watching, policy) if run in (CURRENT, watching.run_id) else None
    if found is None:
        raise UnknownObject(f"no run {run[:200]!r}; GET /v1/runs lists those that can be read")
    if found.rollouts is None:
        raise UnknownObject("this run keeps no completions: it learns from given data, or has metrics.rollouts=off")
    return found.rollouts
