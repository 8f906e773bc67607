"""A reward model's score as one more reward part of every episode. Used by `RolloutRunner`."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.rollout.episode import Episode
from parallm.rollout.scoring import MAX_REWARD, REWARD_MODEL, Score
from parallm.types import FaultyEpisode, ScoringRequest

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

    async def rated(self, groups: Sequence[Sequence[Episode]], scores: Sequence[Sequence[Score]]) -> list[list[Score]]:
        """Return the scores of groups of episodes, with the part in each score that has no fault.

        Raises what `rate` raises.
        """
        pairs = [list(zip(group, own, strict=True)) for group, own in zip(groups, scores, strict=True)]
        ratable = [[episode for episode, score in group if _is_ratable(episode, score)] for group in pairs]
        values = iter(await self.rate([self._request(group) for group in ratable if group]))
        return [
            [
                self._with_part(episode, score, next(values)) if _is_ratable(episode, score) else score
                for episode, score in group
            ]
            for group in pairs
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

    def _with_part(self, episode: Episode, score: Score, value: float) -> Score:
        reward = score.reward + self.weight * value
        if abs(reward) <= MAX_REWARD:
            return Score(parts={**score.parts, REWARD_MODEL: value}, reward=reward)
        kind = "score_too_large" if math.isfinite(reward) else "score_not_finite"
        detail = f"the reward model's score is {value}"
        fault = FaultyEpisode(kind=kind, detail=detail, text=episode.text, tokens=tuple(episode.tokens))
        return Score(parts={}, reward=math.nan, fault=fault)


def _is_ratable(episode: Episode, score: Score) -> bool:
    return score.fault is None and bool(episode.tokens)
