"""Completions that clients have asked to be learned from, and their JSON in the buffer's file.

Made by `LiveSource`, kept by `TrajectoryBuffer`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any

from parallm.types import Trajectory, WeightSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTrajectory:
    trajectory_id: str
    trajectory: Trajectory
    """Tokens and log-probs; the reward means nothing before `rewarded`."""
    request_id: str
    num_asked: int
    """The request's `n`."""
    created: float
    """Seconds of the run, which count only while one of its processes lives; at its beginning they are Unix seconds."""
    scoring_function: str | None = None
    """Name of what rewards it, such as `gsm8k`, unless its client does."""
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may be secret, so it must not get into logs
    """The client's metadata, as JSON, which the scoring function gets."""
    rewarded: float | None = None
    """Time of the first reward, in the same seconds."""
    num_failed: int = 0
    """Steps that took it and changed nothing because of a fault."""
    num_abandoned: int = 0
    """Processes that ended between such a step's beginning and its checkpoint."""

    def with_reward(self, reward: float, parts: Mapping[str, float], now: float) -> "RecordedTrajectory":
        trajectory = replace(self.trajectory, reward=reward, reward_parts=dict(parts))
        return replace(self, trajectory=trajectory, rewarded=now if self.rewarded is None else self.rewarded)

    def relabelled(self, version: int, now: int) -> "RecordedTrajectory":
        """Return the record for a run that has gone back to the weights of `version`, which it calls `now`.

        The distance of each span's version to `now` becomes its distance in updates to `version`: with `version` and
        `now` 5, tokens of 4, 5, 6 and 7 become ones of 4, 5, 4 and 3. So `now` minus a span's version is its age, those
        of abandoned versions included, and only tokens of the very weights have age 0.
        """
        spans = tuple(
            replace(span, version=now - abs(span.version - version)) for span in self.trajectory.weight_versions
        )
        return replace(self, trajectory=replace(self.trajectory, weight_versions=spans))


def prompt_id(tokens: Sequence[int]) -> str:
    """Return a problem's id that follows from the prompt's tokens."""
    text = ",".join(map(str, tokens))
    return f"live/{blake2b(text.encode(), digest_size=16).hexdigest()}"


def to_json(value: Any) -> dict[str, Any]:
    """Return a record, or a part of one, as an object of its fields: the `default` of `json.dumps`."""
    # not `asdict`, which copies every single token
    return {field.name: getattr(value, field.name) for field in fields(value)}


def read_record(values: dict[str, Any]) -> RecordedTrajectory:
    """Undo `to_json`. Raises KeyError, TypeError or ValueError on anything else."""
    known = {field.name: values[field.name] for field in fields(RecordedTrajectory) if field.name in values}
    return RecordedTrajectory(**(known | {"trajectory": read_trajectory(values["trajectory"])}))


def read_trajectory(values: dict[str, Any]) -> Trajectory:
    """Undo `to_json`. Raises KeyError, TypeError or ValueError on anything else."""
    tuples = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    spans = tuple(WeightSpan(**span) for span in values["weight_versions"])
    return Trajectory(**(values | tuples | {"weight_versions": spans}))
