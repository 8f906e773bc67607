"""Completions that clients have asked to be learned from, and each change to them as a line of the buffer's file.

Written and read by `TrajectoryBuffer`; `LiveSource` makes the records.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any, TypeAlias, assert_never

from parallm.types import Completion, GenerationRequest, Trajectory, WeightSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """How a client's completions are rewarded, unless it sends a reward itself."""

    scoring_function: str | None = None
    """Name of a scoring function, such as `gsm8k`."""
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may be secret, so it must not get into logs
    """The client's metadata, as JSON, which the scoring function gets."""


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
    reward_request: RewardRequest
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


def record_completion(
    trajectory_id: str, request: GenerationRequest, completion: Completion, reward_request: RewardRequest, now: float
) -> RecordedTrajectory:
    """Return a record of the very tokens and log-probs of a completion."""
    trajectory = Trajectory(
        problem_id=prompt_id(request.prompt_tokens),
        prompt_tokens=request.prompt_tokens,
        tokens=completion.tokens,
        loss_mask=(True,) * len(completion.tokens),
        logprobs=completion.logprobs,
        temperature=request.sampling.temperature,
        weight_versions=completion.weight_versions,
        reward_parts={},
        reward=0.0,
        text=completion.text,
        finish_reason=completion.finish_reason,
    )
    return RecordedTrajectory(
        trajectory_id=trajectory_id,
        trajectory=trajectory,
        request_id=request.request_id,
        num_asked=request.n,
        created=now,
        reward_request=reward_request,
    )


def prompt_id(tokens: Sequence[int]) -> str:
    """Return a problem's id that follows from the prompt's tokens."""
    text = ",".join(map(str, tokens))
    return f"live/{blake2b(text.encode(), digest_size=16).hexdigest()}"


def to_values(record: RecordedTrajectory) -> dict[str, Any]:
    """Return a record as JSON."""
    return {
        "trajectory_id": record.trajectory_id,
        "trajectory": trajectory_to_json(record.trajectory),
        "request_id": record.request_id,
        "num_asked": record.num_asked,
        "created": record.created,
        "rewarded": record.rewarded,
        "num_failed": record.num_failed,
        "num_abandoned": record.num_abandoned,
        "scoring_function": record.reward_request.scoring_function,
        "metadata": dict(record.reward_request.metadata),
    }


def from_values(values: Mapping[str, Any]) -> RecordedTrajectory:
    """Undo `to_values`. Raises KeyError or TypeError on anything else."""
    fields = {name: values[name] for name in ("trajectory_id", "request_id", "num_asked", "created", "rewarded")}
    fields |= {name: values.get(name, 0) for name in ("num_failed", "num_abandoned")}
    reward_request = RewardRequest(scoring_function=values["scoring_function"], metadata=values["metadata"])
    return RecordedTrajectory(
        trajectory=trajectory_from_json(values["trajectory"]), reward_request=reward_request, **fields
    )


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    # not `asdict`, which copies every single token
    values = {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
    return values | {
        "weight_versions": [asdict(span) for span in trajectory.weight_versions],
        "reward_parts": dict(trajectory.reward_parts),
    }


def trajectory_from_json(values: dict[str, Any]) -> Trajectory:
    """Undo `trajectory_to_json`. Raises KeyError or TypeError on anything else."""
    tuples = {name: tuple(values[name]) for name in ("prompt_tokens", "tokens", "loss_mask", "logprobs")}
    if (token_advantages := values.get("token_advantages")) is not None:
        tuples["token_advantages"] = tuple(token_advantages)
    spans = tuple(WeightSpan(**span) for span in values["weight_versions"])
    return Trajectory(**(values | tuples | {"weight_versions": spans}))


TRAINED = "trained"
"""Reason of trajectories that left because a checkpoint has learned from them; all other reasons are drops."""


@dataclass(frozen=True, slots=True)
class Added:
    record: RecordedTrajectory


@dataclass(frozen=True, slots=True)
class Rewarded:
    trajectory_id: str
    reward: float
    parts: Mapping[str, float]
    at: float


@dataclass(frozen=True, slots=True)
class Reserved:
    """A step learns from these, which are its own until a checkpoint holds the step."""

    ids: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Requeued:
    """These wait again: no version that is left has learned from them."""

    ids: tuple[str, ...]
    has_failed: bool
    """Whether their step changed nothing because of a fault."""


@dataclass(frozen=True, slots=True)
class Removed:
    ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Branched:
    """The run has gone back to the weights of `version`, which it calls `now`; see `RecordedTrajectory.relabelled`."""

    version: int
    now: int


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts of everything that the file held before it was written anew."""

    num_collected: int
    num_left: Mapping[str, int]
    departed: Mapping[str, tuple[str, float | None]]
    """Reason and reward of the newest ids that have left."""


Change: TypeAlias = Added | Rewarded | Reserved | Requeued | Removed | Branched | Counted


def to_line(change: Change) -> dict[str, Any]:
    match change:
        case Added(record):
            return {"added": to_values(record)}
        case Rewarded(trajectory_id, reward, parts, at):
            return {"rewarded": trajectory_id, "reward": reward, "parts": dict(parts), "at": at}
        case Reserved(ids, step):
            return {"reserved": ids, "step": step}
        case Requeued(ids, has_failed):
            return {"given_back": ids, "failed": has_failed}
        case Removed(ids, reason):
            return {"gone": ids, "reason": reason}
        case Branched(version, now):
            return {"branched": version, "now": now}
        case Counted(num_collected, num_left, departed):
            return {"collected": num_collected, "left": dict(num_left), "departed": dict(departed)}
        case _:
            assert_never(change)


def from_line(line: Mapping[str, Any]) -> Change | None:
    """Undo `to_line`; None for a line of no known kind. Raises KeyError, TypeError or ValueError for a broken one."""
    match line:
        case {"added": added}:
            return Added(from_values(added))
        case {"rewarded": str(trajectory_id), "reward": reward, "parts": parts, "at": at}:
            return Rewarded(trajectory_id, float(reward), dict(parts), float(at))
        case {"reserved": ids, "step": int(step)}:
            return Reserved(tuple(ids), step)
        case {"given_back": ids, "failed": bool(has_failed)}:
            return Requeued(tuple(ids), has_failed)
        case {"gone": ids, "reason": str(reason)}:
            return Removed(tuple(ids), reason)
        case {"branched": int(version), "now": int(now)}:
            return Branched(version, now)
        case {"collected": int(num_collected), "left": dict(num_left), "departed": dict(departed)}:
            return Counted(
                num_collected, num_left, {name: (reason, reward) for name, (reason, reward) in departed.items()}
            )
        case _:
            return None
