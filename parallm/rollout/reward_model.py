"""A reward model's score as one more reward part of every episode, whatever the environment."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.rollout.episode import Episode
from parallm.rollout.scoring import MAX_REWARD, REWARD_MODEL, Score
from parallm.types import FaultyEpisode, ScoringRequest

Rate = Callable[[Sequence[ScoringRequest]], Awaitable[list[float]]]
"""Scores of all completions, in the order of the prompts and of each prompt's completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """Adds the part `rollout/reward_model`. It reads the very tokens that were sampled, replies between turns included.

    Runs on the asyncio thread.
    """

    rate: Rate
    weight: float
    tokenizer: ChatTokenizer

    async def rated(self, rows: Sequence[Sequence[Episode]], scores: Sequence[Sequence[Score]]) -> list[list[Score]]:
        """The scores of episodes, of one problem in a row, with the part in each that has no fault.

        Raises what `rate` raises.
        """
        pairs = [list(zip(row, own, strict=True)) for row, own in zip(rows, scores, strict=True)]
        fitting = [[episode for episode, score in row if _fits(episode, score)] for row in pairs]
        values = iter(await self.rate([self._prompted(row) for row in fitting if row]))
        return [
            [
                self._with_part(episode, score, next(values)) if _fits(episode, score) else score
                for episode, score in row
            ]
            for row in pairs
        ]

    def _prompted(self, row: Sequence[Episode]) -> ScoringRequest:
        return ScoringRequest(
            prompt_tokens=row[0].request.prompt_tokens,
            completions=tuple(self._ended(episode) for episode in row),
        )

    def _ended(self, episode: Episode) -> tuple[int, ...]:
        """What is scored. A completion that was cut off is read as if it ended there: the score is that of an end."""
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


def _fits(episode: Episode, score: Score) -> bool:
    return score.fault is None and bool(episode.tokens)
