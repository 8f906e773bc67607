"""One episode token by token, and the trajectory that the learner trains on. Written by `RolloutRunner`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from parallm.array_row import ArrayRow, as_array
from parallm.environment.environment import EnvironmentSession
from parallm.rollout.environment_calls import EnvironmentFault
from parallm.types import (
    Completion,
    FaultyEpisode,
    FinishReason,
    GenerationRequest,
    Message,
    Problem,
    Trajectory,
    WeightSpan,
)


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """One completion, or several with replies between them.

    `tokens` is everything after the prompt and only grows. Sampled tokens are trained on; those of replies are not.
    """

    problem: Problem
    request: GenerationRequest
    """The first request; its `max_tokens` is the limit of all tokens together."""
    index: int
    """Index among the request's `n` completions."""
    session: EnvironmentSession | None = None
    """None where the environment's episodes have no state."""
    tokens: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[WeightSpan] = field(default_factory=list)
    turns: list[Message] = field(default_factory=list)
    num_newest: int = 0
    """Number of tokens of the model's newest turn."""
    text: str = ""
    finish_reason: FinishReason = "stop"
    is_over: bool = False
    fault: EnvironmentFault | None = None

    @property
    def num_left(self) -> int:
        return self.request.sampling.max_tokens - len(self.tokens)

    def faulty(self, kind: str, detail: str, traceback: str = "") -> FaultyEpisode:
        """Return what is reported of the episode in place of a score."""
        return FaultyEpisode(kind=kind, detail=detail, text=self.text, tokens=tuple(self.tokens), traceback=traceback)

    def append_completion(self, completion: Completion, text: str, turn: Message | None = None) -> None:
        """Append a completion with its text, as the message `turn` where that is not the plain text."""
        start = len(self.tokens)
        self.tokens += completion.tokens
        self.is_sampled += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.weight_versions += [
            WeightSpan(version=span.version, start=start + span.start, end=start + span.end)
            for span in completion.weight_versions
        ]
        self.num_newest = len(completion.tokens)
        self.turns.append(turn or Message(role="assistant", content=text))
        self.text += text
        self.finish_reason = completion.finish_reason
        self.is_over = completion.finish_reason != "stop"

    def append_reply(self, reply: Sequence[Message], tokens: Sequence[int]) -> None:
        """Append the environment's reply. Without room for one more sampled token the episode ends before it."""
        if len(tokens) >= self.num_left:
            self.finish_reason, self.is_over = "length", True
            return
        self.tokens += tokens
        self.is_sampled += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.turns += reply


def trajectory_of(
    episode: Episode, *, reward: float, parts: Mapping[str, float], loss_mask: Sequence[bool]
) -> Trajectory:
    """Return the very tokens and log-probs of the episode; `loss_mask` says which of them are trained on."""
    return Trajectory(
        problem_id=episode.problem.problem_id,
        prompt_tokens=episode.request.prompt_tokens,
        tokens=ArrayRow(as_array(episode.tokens, np.int32)),
        loss_mask=ArrayRow(np.frombuffer(bytes(loss_mask), np.bool_)),
        logprobs=ArrayRow(as_array(episode.logprobs, np.float64)),
        temperature=episode.request.sampling.temperature,
        weight_versions=tuple(episode.weight_versions),
        reward_parts=parts,
        reward=reward,
        text=episode.text,
        finish_reason=episode.finish_reason,
    )
