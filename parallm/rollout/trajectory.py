"""An episode with its reward, as the learner trains on it."""

from collections.abc import Mapping

from parallm.rollout.episode import Episode
from parallm.types import Trajectory


def trajectory_of(
    episode: Episode, *, reward: float, parts: Mapping[str, float], loss_mask: tuple[bool, ...]
) -> Trajectory:
    """The very tokens and log-probs of the episode; `loss_mask` says which of them are trained on."""
    return Trajectory(
        problem_id=episode.problem.problem_id,
        prompt_tokens=episode.request.prompt_tokens,
        tokens=tuple(episode.tokens),
        loss_mask=loss_mask,
        logprobs=tuple(episode.logprobs),
        temperature=episode.request.sampling.temperature,
        weight_versions=tuple(episode.weight_versions),
        reward_parts=parts,
        reward=reward,
        text=episode.text,
        finish_reason=episode.finish_reason,
    )
