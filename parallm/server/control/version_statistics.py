"""What each version has answered, by the name that clients asked for. On the asyncio thread."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from parallm.errors import InvalidRequest
from parallm.server.catalog import resolved_to
from parallm.server.engine_gateway import answer_id
from parallm.server.generation import version_of
from parallm.types import AdapterCard, Completion, GenerationRequest

MAX_NAMES = 256
MAX_VERSIONS = 64
"""Of each name; the newest ones are kept."""
MAX_ANSWERS = 16_384
"""Answers that a reward may still come for."""

Value = TypeVar("Value")


@dataclass(slots=True)
class VersionCounts:
    """Changed by `VersionStatistics` only."""

    num_requests: int = 0
    num_completions: int = 0
    num_tokens: int = 0
    num_rewards: int = 0
    reward_sum: float = 0.0

    @property
    def reward_mean(self) -> float | None:
        return self.reward_sum / self.num_rewards if self.num_rewards else None


@dataclass(slots=True)
class _Judged:
    """A completion that rewards may come for, and the one that has come."""

    version: VersionCounts
    reward: float | None = None


class VersionStatistics:
    """Counts since the start of the process, bounded in names and versions."""

    def __init__(self, catalog: Callable[[], tuple[AdapterCard, ...]]) -> None:
        self._catalog = catalog
        self._names: OrderedDict[str, OrderedDict[str, VersionCounts]] = OrderedDict()
        self._answers: OrderedDict[str, VersionCounts] = OrderedDict()
        self._trajectories: OrderedDict[str, _Judged] = OrderedDict()

    def count(self, request: GenerationRequest, completions: Sequence[Completion]) -> None:
        """One request that has ended."""
        one = self._of(request, completions[0])
        one.num_requests += 1
        one.num_completions += len(completions)
        one.num_tokens += sum(len(completion.tokens) for completion in completions)
        _keep(self._answers, answer_id(request.request_id), one, MAX_ANSWERS)

    def reward(self, answer: str, reward: float) -> None:
        """Add a reward to the version that gave this answer. Raises InvalidRequest for an id that is not known."""
        found = next((self._answers[name] for name in _names_of(answer) if name in self._answers), None)
        if found is None:
            raise InvalidRequest(
                f"no answer {answer[:100]!r} among the last {MAX_ANSWERS}; send the `id` of an answer that has ended",
                "id",
            )
        found.num_rewards += 1
        found.reward_sum += reward

    def note_trajectory(self, trajectory_id: str, request: GenerationRequest, completion: Completion) -> None:
        """A completion that a policy learns from: its reward is one of the version that gave it."""
        _keep(self._trajectories, trajectory_id, _Judged(self._of(request, completion)), MAX_ANSWERS)

    def reward_trajectory(self, trajectory_id: str, reward: float) -> None:
        """The reward of a trajectory; the last one counts. Those of an earlier process are nobody's here."""
        judged = self._trajectories.get(trajectory_id)
        if judged is None:
            return
        if judged.reward is None:
            judged.version.num_rewards += 1
        judged.version.reward_sum += reward - (judged.reward or 0.0)
        judged.reward = reward

    def of(self, name: str) -> dict[str, VersionCounts]:
        """By version."""
        return dict(self._names.get(name, {}))

    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def _of(self, request: GenerationRequest, completion: Completion) -> VersionCounts:
        name = request.split or request.model
        version = resolved_to(request.model, version_of(completion), self._catalog())
        versions = _keep(self._names, name, self._names.get(name, OrderedDict()), MAX_NAMES)
        return _keep(versions, version, versions.get(version, VersionCounts()), MAX_VERSIONS)


def _names_of(answer: str) -> tuple[str, ...]:
    """An answer by its id, or by the `request_id` of its request."""
    return answer, f"cmpl-{answer}", f"chatcmpl-{answer}"


def _keep(kept: OrderedDict[str, Value], key: str, value: Value, most: int) -> Value:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
    return value
