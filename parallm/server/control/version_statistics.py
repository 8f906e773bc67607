"""Counts and rewards of what each version has answered, by the name that clients asked for.

The engine gateway counts each request that has ended; `routes_splits.py` and `/metrics` show the counts. On the asyncio
thread only.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from parallm.errors import InvalidRequest
from parallm.server.catalog import answered_by
from parallm.server.engine_gateway import answer_id
from parallm.types import AdapterCard, Completion, GenerationRequest

MAX_NAMES = 256
MAX_VERSIONS = 64
"""Versions of each name; the newest ones are kept."""
MAX_ANSWERS = 16_384
"""Answers that a reward may still come for."""

Value = TypeVar("Value")


@dataclass(slots=True)
class VersionCounts:
    num_requests: int = 0
    num_completions: int = 0
    num_tokens: int = 0
    num_rewards: int = 0
    reward_sum: float = 0.0

    @property
    def reward_mean(self) -> float | None:
        return self.reward_sum / self.num_rewards if self.num_rewards else None


@dataclass(slots=True)
class _Trajectory:
    """The version that gave a trajectory, and its last reward."""

    counts: VersionCounts
    reward: float | None = None


class VersionStatistics:
    """Counts since the start of the process, bounded in names and versions."""

    def __init__(self, catalog: Callable[[], tuple[AdapterCard, ...]]) -> None:
        self._catalog = catalog
        self._names: OrderedDict[str, OrderedDict[str, VersionCounts]] = OrderedDict()
        self._answers: OrderedDict[str, VersionCounts] = OrderedDict()
        self._trajectories: OrderedDict[str, _Trajectory] = OrderedDict()

    def count(self, request: GenerationRequest, completions: Sequence[Completion]) -> None:
        """Count one request that has ended."""
        counts = self._counts(request, completions[0])
        counts.num_requests += 1
        counts.num_completions += len(completions)
        counts.num_tokens += sum(len(completion.tokens) for completion in completions)
        _keep(self._answers, answer_id(request.request_id), counts, MAX_ANSWERS)

    def reward(self, answer: str, reward: float) -> None:
        """Add a reward to the version that gave this answer. Raises InvalidRequest for an unknown id.

        `answer` is the id of the answer or the `request_id` of its request.
        """
        names = (answer, f"cmpl-{answer}", f"chatcmpl-{answer}")
        counts = next((self._answers[name] for name in names if name in self._answers), None)
        if counts is None:
            raise InvalidRequest(
                f"no answer {answer[:100]!r} among the last {MAX_ANSWERS}; send the `id` of an answer that has ended",
                "id",
            )
        counts.num_rewards += 1
        counts.reward_sum += reward

    def note_trajectory(self, trajectory_id: str, request: GenerationRequest, completion: Completion) -> None:
        """Remember which version gave a trajectory, for its reward."""
        _keep(self._trajectories, trajectory_id, _Trajectory(self._counts(request, completion)), MAX_ANSWERS)

    def reward_trajectory(self, trajectory_id: str, reward: float) -> None:
        """Count the reward of a trajectory, of which the last one counts; those of an earlier process are ignored."""
        trajectory = self._trajectories.get(trajectory_id)
        if trajectory is None:
            return
        if trajectory.reward is None:
            trajectory.counts.num_rewards += 1
        trajectory.counts.reward_sum += reward - (trajectory.reward or 0.0)
        trajectory.reward = reward

    def of(self, name: str) -> dict[str, VersionCounts]:
        """Return the counts by version."""
        return dict(self._names.get(name, {}))

    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def _counts(self, request: GenerationRequest, completion: Completion) -> VersionCounts:
        name = request.split or request.model
        version = answered_by(request.model, completion, self._catalog())
        versions = _keep(self._names, name, self._names.get(name, OrderedDict()), MAX_NAMES)
        return _keep(versions, version, versions.get(version, VersionCounts()), MAX_VERSIONS)


def _keep(kept: OrderedDict[str, Value], key: str, value: Value, limit: int) -> Value:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > limit:
        kept.popitem(last=False)
    return value
