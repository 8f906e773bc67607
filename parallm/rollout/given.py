"""Trajectories that somebody brings as the groups of one update. Pure."""

from collections.abc import Iterable, Sequence

from parallm.errors import InvalidRequest
from parallm.learner.settings import Advantage
from parallm.rollout.live.recorded import prompt_id
from parallm.types import Problem, Trajectory, TrajectoryGroup, WeightSpan
from parallm.updates import GivenTrajectory

ONLY = "reward"
"""The name of a reward that is one number."""


def check_given(given: Sequence[GivenTrajectory], *, version: int, limit: int, num_token_ids: int) -> None:
    """Raise InvalidRequest, naming the first at fault, for what a learner at `version` cannot train on.

    `limit` is the most versions that a trained token may be older.
    """
    for place, one in enumerate(given):
        name = f"trajectories.{place}"
        if not all(0 <= token < num_token_ids for token in (*one.prompt_tokens, *one.tokens)):
            raise InvalidRequest(f"token ids of {name} must be from 0 to {num_token_ids - 1}", name)
        for span in one.weight_versions:
            if not 0 <= version - span.version <= limit:
                raise InvalidRequest(
                    f"{name} is of version {span.version} and the learner is at version {version}; it trains on no "
                    f"older ones than trainer.max_off_policy_steps={limit} says; without logprobs and version it "
                    "counts as a sample of the present one",
                    name,
                )


def groups_of(
    given: Sequence[GivenTrajectory], logprobs: Sequence[Sequence[float]], version: int
) -> tuple[TrajectoryGroup, ...]:
    """By group, in the order of their first trajectories. `logprobs` are given ones, or those of `version`."""
    groups: dict[str, list[Trajectory]] = {}
    for one, own in zip(given, logprobs, strict=True):
        problem = prompt_id(one.prompt_tokens) if one.group is None else f"given/{one.group}"
        groups.setdefault(problem, []).append(_trajectory(one, problem, own, version))
    return tuple(
        TrajectoryGroup(problem=Problem(problem_id=name, messages=(), answer=""), trajectories=tuple(trajectories))
        for name, trajectories in groups.items()
    )


def with_signal(groups: Iterable[TrajectoryGroup], advantage: Advantage) -> tuple[TrajectoryGroup, ...]:
    """Those that a learner with this advantage can learn from. Raises InvalidRequest where there are none."""
    found = tuple(groups)
    rewards = {reward for group in found for reward in group.rewards}
    match advantage:
        case "reinforce_pp":  # compares all with all
            good = found if len(rewards) > 1 else ()
        case "reward":
            good = tuple(group for group in found if any(group.rewards))
        case _:
            good = tuple(group for group in found if group.has_signal)
    if not good:
        raise InvalidRequest(
            f"there is nothing to learn: learner.advantage={advantage} compares the trajectories of a group, and in "
            f"each of {len(found)} groups all rewards are equal; send groups of two or more with different rewards",
            "trajectories",
        )
    return good


def _trajectory(one: GivenTrajectory, problem: str, logprobs: Sequence[float], version: int) -> Trajectory:
    spans = one.weight_versions if one.logprobs is not None else ()
    return Trajectory(
        problem_id=problem,
        prompt_tokens=one.prompt_tokens,
        tokens=one.tokens,
        loss_mask=one.loss_mask,
        logprobs=tuple(logprobs),
        temperature=one.temperature,
        weight_versions=spans or (WeightSpan(version=version, start=0, end=len(one.tokens)),),
        reward_parts={ONLY: one.reward},
        reward=one.reward,
        text=one.text,
        finish_reason=one.finish_reason,
    )
