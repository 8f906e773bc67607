"""Groups of one update from trajectories that a client sends. Pure; used by `GivenUpdates`."""

from collections.abc import Iterable, Sequence

from parallm.errors import InvalidRequest
from parallm.learner.settings import Advantage
from parallm.rollout.live.records import prompt_id
from parallm.rollout.scoring import SCALAR_REWARD
from parallm.types import GivenTrajectory, Problem, Trajectory, TrajectoryGroup, WeightSpan


def check_trajectories(given: Sequence[GivenTrajectory], *, version: int, limit: int, num_token_ids: int) -> None:
    """Raise InvalidRequest for the first trajectory that a learner at `version` cannot train on.

    `limit` is the largest age of a trained token in versions.
    """
    for index, trajectory in enumerate(given):
        name = f"trajectories.{index}"
        if not all(0 <= token < num_token_ids for token in (*trajectory.prompt_tokens, *trajectory.tokens)):
            raise InvalidRequest(f"token ids of {name} must be from 0 to {num_token_ids - 1}", name)
        for span in trajectory.weight_versions:
            if not 0 <= version - span.version <= limit:
                raise InvalidRequest(
                    f"{name} is of version {span.version} and the learner is at version {version}; "
                    f"trainer.max_off_policy_steps={limit} allows no older ones; without logprobs and version it "
                    "counts as a sample of the present version",
                    name,
                )


def groups_of(
    given: Sequence[GivenTrajectory], logprobs: Sequence[Sequence[float]], version: int
) -> tuple[TrajectoryGroup, ...]:
    """Return the groups, in the order of their first trajectories. `version` sampled those without log-probs."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory, token_logprobs in zip(given, logprobs, strict=True):
        group = trajectory.group
        problem = prompt_id(trajectory.prompt_tokens) if group is None else f"given/{group}"
        groups.setdefault(problem, []).append(_trajectory(trajectory, problem, token_logprobs, version))
    return tuple(
        TrajectoryGroup(problem=Problem(problem_id=name, messages=(), answer=""), trajectories=tuple(trajectories))
        for name, trajectories in groups.items()
    )


def with_signal(groups: Iterable[TrajectoryGroup], advantage: Advantage) -> tuple[TrajectoryGroup, ...]:
    """Return the groups that have a signal for this advantage. Raises InvalidRequest if there are none."""
    groups = tuple(groups)
    rewards = {reward for group in groups for reward in group.rewards}
    match advantage:
        case "reinforce_pp":  # compares all trajectories with each other
            trained = groups if len(rewards) > 1 else ()
        case "batch_std" | "reinforce_pp_baseline":  # the others' statistics are of all groups
            trained = groups if any(group.has_signal for group in groups) else ()
        case "reward":
            trained = tuple(group for group in groups if any(group.rewards))
        case _:
            trained = tuple(group for group in groups if group.has_signal)
    if not trained:
        raise InvalidRequest(
            f"there is nothing to learn: learner.advantage={advantage} compares the trajectories of a group, and in "
            f"each of {len(groups)} groups all rewards are equal; send groups of two or more with different rewards",
            "trajectories",
        )
    return trained


def _trajectory(given: GivenTrajectory, problem: str, logprobs: Sequence[float], version: int) -> Trajectory:
    spans = given.weight_versions if given.logprobs is not None else ()
    return Trajectory(
        problem_id=problem,
        prompt_tokens=given.prompt_tokens,
        tokens=given.tokens,
        loss_mask=given.loss_mask,
        logprobs=tuple(logprobs),
        temperature=given.temperature,
        weight_versions=spans or (WeightSpan(version=version, start=0, end=len(given.tokens)),),
        reward_parts={SCALAR_REWARD: given.reward},
        reward=given.reward,
        text=given.text,
        finish_reason=given.finish_reason,
    )
