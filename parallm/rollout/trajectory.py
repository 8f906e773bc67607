"""A scored completion as the learner trains on it."""

from collections.abc import Mapping

from parallm.types import Completion, GenerationRequest, Trajectory


def trajectory_of(
    request: GenerationRequest,
    completion: Completion,
    *,
    problem_id: str,
    reward: float,
    parts: Mapping[str, float],
) -> Trajectory:
    """All tokens are trained on: each was sampled."""
    return Trajectory(
        problem_id=problem_id,
        prompt_tokens=request.prompt_tokens,
        tokens=completion.tokens,
        loss_mask=(True,) * len(completion.tokens),
        logprobs=completion.logprobs,
        temperature=request.sampling.temperature,
        weight_versions=completion.weight_versions,
        reward_parts=parts,
        reward=reward,
        text=completion.text,
        finish_reason=completion.finish_reason,
    )
