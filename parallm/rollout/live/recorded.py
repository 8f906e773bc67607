"""One completion that a client has asked to be learned from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from parallm.checkpoint.trajectory_lines import trajectory_from_json, trajectory_to_json
from parallm.types import Completion, GenerationRequest, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How a client wants its completions to be rewarded, beside rewards that it sends later."""

    scoring_function: str | None = None
    """One of `rollout.live.scoring_functions`."""
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may be secret, so it must not get into logs
    """For the scoring function, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    trajectory_id: str
    trajectory: Trajectory
    """Its reward means nothing before `rewarded`."""
    request_id: str
    num_asked: int
    """The request's `n`."""
    created: float
    """Seconds of the run, which count only while one of its processes is there; Unix seconds at its beginning."""
    wish: Wish
    rewarded: float | None = None
    """When its first reward came, in the same seconds."""
    num_failed: int = 0
    """Steps that took it and changed nothing because of a fault."""
    num_abandoned: int = 0
    """Processes that ended between such a step's beginning and its checkpoint."""

    def with_reward(self, reward: float, parts: Mapping[str, float], now: float) -> "Recorded":
        trajectory = replace(self.trajectory, reward=reward, reward_parts=dict(parts))
        return replace(self, trajectory=trajectory, rewarded=now if self.rewarded is None else self.rewarded)

    def relabelled(self, version: int, now: int) -> "Recorded":
        """The same for a run that has gone back to the weights of `version`, which it calls `now`.

        Each span's version becomes as much less than `now` as its weights are updates away from those of `version`,
        those of abandoned versions, too: with `version` and `now` 5, tokens of 4, 5, 6 and 7 become ones of 4, 5, 4
        and 3. So `now` less a span's version is its age, and only tokens of the very weights are as young as `now`.
        """
        spans = tuple(
            replace(span, version=now - abs(span.version - version)) for span in self.trajectory.weight_versions
        )
        return replace(self, trajectory=replace(self.trajectory, weight_versions=spans))


def recorded_of(
    trajectory_id: str, request: GenerationRequest, completion: Completion, wish: Wish, now: float
) -> Recorded:
    """The very tokens and log-probs of a completion."""
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
    return Recorded(
        trajectory_id=trajectory_id,
        trajectory=trajectory,
        request_id=request.request_id,
        num_asked=request.n,
        created=now,
        wish=wish,
    )


def prompt_id(tokens: Sequence[int]) -> str:
    """The same for the same tokens, and another one for others."""
    text = ",".join(map(str, tokens))
    return f"live/{blake2b(text.encode(), digest_size=16).hexdigest()}"


def to_values(one: Recorded) -> dict[str, Any]:
    """As JSON."""
    return {
        "trajectory_id": one.trajectory_id,
        "trajectory": trajectory_to_json(one.trajectory),
        "request_id": one.request_id,
        "num_asked": one.num_asked,
        "created": one.created,
        "rewarded": one.rewarded,
        "num_failed": one.num_failed,
        "num_abandoned": one.num_abandoned,
        "scoring_function": one.wish.scoring_function,
        "metadata": dict(one.wish.metadata),
    }


def from_values(values: Mapping[str, Any]) -> Recorded:
    """Undo `to_values`. Raises KeyError or TypeError on anything else."""
    own = {name: values[name] for name in ("trajectory_id", "request_id", "num_asked", "created", "rewarded")}
    own |= {name: values.get(name, 0) for name in ("num_failed", "num_abandoned")}
    wish = Wish(scoring_function=values["scoring_function"], metadata=values["metadata"])
    return Recorded(trajectory=trajectory_from_json(values["trajectory"]), wish=wish, **own)
