"""A reward model's score as one more reward part of every episode. Used by `RolloutRunner`."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.rollout.episode import Episode
from parallm.rollout.scoring import MAX_REWARD, REWARD_MODEL, Score, ScoredEpisode
from parallm.types import ScoringRequest

Rate = Callable[[Sequence[ScoringRequest]], Awaitable[list[float]]]
"""Returns the scores of all completions, in the order of the prompts and of each prompt's completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """Adds the part `rollout/reward_model`, from the very tokens that were sampled and the replies between turns.

    Used on the asyncio thread.
    """

    rate: Rate
    weight: float
    tokenizer: ChatTokenizer

    async def rated(self, groups: Sequence[Sequence[ScoredEpisode]]) -> list[list[ScoredEpisode]]:
        """Return the groups with the part in each score that has no fault. Raises what `rate` raises."""
        ratable = [[scored.episode for scored in group if _is_ratable(scored)] for group in groups]
        values = iter(await self.rate([self._request(group) for group in ratable if group]))
        return [
            [self._with_part(scored, next(values)) if _is_ratable(scored) else scored for scored in group]
            for group in groups
        ]

    def _request(self, group: Sequence[Episode]) -> ScoringRequest:
        return ScoringRequest(
            prompt_tokens=group[0].request.prompt_tokens,
            completions=tuple(self._ended(episode) for episode in group),
        )

    def _ended(self, episode: Episode) -> tuple[int, ...]:
        """Return the episode's tokens with an end: a completion that was cut off is scored as if it ended there."""
        if episode.tokens[-1] in self.tokenizer.eos_token_ids:
            return tuple(episode.tokens)
        return (*episode.tokens, self.tokenizer.encode_answer(episode.problem.messages, "")[-1])

    def _with_part(self, scored: ScoredEpisode, value: float) -> ScoredEpisode:
        episode, score = scored.episode, scored.score
        reward = score.reward + self.weight * value
        if abs(reward) <= MAX_REWARD:
            return replace(scored, score=Score(parts={**score.parts, REWARD_MODEL: value}, reward=reward))
        kind = "score_too_large" if math.isfinite(reward) else "score_not_finite"
        fault = episode.faulty(kind, f"the reward model's score is {value}")
        return replace(scored, score=Score(parts={}, reward=math.nan, fault=fault))


def _is_ratable(scored: ScoredEpisode) -> bool:
    return scored.score.fault is None and bool(scored.episode.tokens)
