"""A posted group and what is known of its sampling -> what the learner trains on. Pure.

Axes: T tokens of a posted sequence, N of its trajectory: from the first trained one to the last.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from parallm.integrations.atropos.sample_store import SamplingRecord
from parallm.integrations.atropos.scored_group import GroupRefused, ScoredGroup, ScoredSequence
from parallm.types import Problem, Trajectory, TrajectoryGroup, WeightSpan

Decode = Callable[[Sequence[int]], str]


def group_of(scored: ScoredGroup, behaviours: Sequence[SamplingRecord], decode: Decode) -> TrajectoryGroup:
    """Raises GroupRefused for tokens that are no samples of one policy at one temperature."""
    for one in behaviours:
        if one.temperature == 0:
            raise GroupRefused("greedy", "its tokens were sampled at temperature 0")
        if not np.isfinite(one.temperature):
            raise GroupRefused("mixed_temperatures", "turns of one sequence were sampled at different temperatures")
    environment = "unknown" if scored.env_id is None else f"env_{scored.env_id}"
    first = scored.sequences[0]
    start = int(first.trained_T.argmax())
    digest = blake2b(first.tokens_T[:start].tobytes(), digest_size=8).hexdigest()
    problem = Problem(problem_id=f"{environment}/{digest}", messages=(), answer="", environment=environment)
    is_alone = len(scored.sequences) == 1
    return TrajectoryGroup(
        problem=problem,
        trajectories=tuple(
            _trajectory(sequence, behaviour, problem.problem_id, decode, is_alone=is_alone)
            for sequence, behaviour in zip(scored.sequences, behaviours, strict=True)
        ),
    )


def _trajectory(
    sequence: ScoredSequence, behaviour: SamplingRecord, problem_id: str, decode: Decode, *, is_alone: bool
) -> Trajectory:
    """Tokens behind the last trained one predict nothing that counts, so they are left out."""
    trained = np.flatnonzero(sequence.trained_T)
    start, end = (int(trained[0]), int(trained[-1]) + 1) if len(trained) else (len(sequence.tokens_T),) * 2
    here = slice(start, end)
    mask_N = sequence.trained_T[here]
    tokens = tuple(sequence.tokens_T[here].tolist())
    return Trajectory(
        problem_id=problem_id,
        prompt_tokens=tuple(sequence.tokens_T[:start].tolist()),
        tokens=tokens,
        loss_mask=tuple(mask_N.tolist()),
        logprobs=tuple(np.where(mask_N, behaviour.logprobs_T[here], 0.0).tolist()),
        temperature=behaviour.temperature,
        weight_versions=spans_of(behaviour.versions_T[here], mask_N),
        reward_parts={},
        reward=sequence.score,
        text=decode(tokens),
        finish_reason=behaviour.finish_reason,
        token_advantages=_own_advantages(sequence, here, is_alone=is_alone),
    )


def _own_advantages(sequence: ScoredSequence, here: slice, *, is_alone: bool) -> tuple[float, ...] | None:
    """Advantages that do not follow from the scores of the group, as atroposlib's example trainer has them.

    A group of one keeps its score, since there is nothing to compare it with.
    """
    length = here.stop - here.start
    if sequence.is_zeroed:
        return (0.0,) * length
    if sequence.is_demonstration:
        return (1.0,) * length
    if sequence.advantages_T is not None:
        return tuple(sequence.advantages_T[here].tolist())
    return (sequence.score,) * length if is_alone else None


def spans_of(versions_N: np.ndarray, mask_N: np.ndarray) -> tuple[WeightSpan, ...]:
    """Runs of trained tokens of one version."""
    keys_N = np.where(mask_N, versions_N, -1)
    cuts = [0, *(np.flatnonzero(np.diff(keys_N)) + 1).tolist(), len(keys_N)] if len(keys_N) else []
    runs = [(start, end) for start, end in pairwise(cuts) if mask_N[start]]
    return tuple(WeightSpan(version=int(versions_N[start]), start=start, end=end) for start, end in runs)
