"""The nouns that cross borders between parts: frozen, without arrays, without HTTP words."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from parallm.conversation import ToolCall

TrafficClass = Literal["serving", "rollout"]
FinishReason = Literal["stop", "length", "abort"]
Split = Literal["train", "test"]

BASE = "base"
"""The name that requests use for the frozen model without an adapter."""
POLICY = "policy"
"""The name of the adapter that the learner trains, unless it trains several."""
LATEST = "latest"
"""The newest version of `policy`, whether clients get it as `policy` already or not."""
BEST = "best"
"""The best version by evaluation."""


class TokenMask(Protocol):
    """Where one completion stands in its grammar. Used on the device thread, between its steps; must not raise."""

    def allowed(self) -> bytes:
        """One bit for each token id that may come next, the lowest bit of the first byte first.

        Ids beyond its end are not allowed. The model's end tokens are, where the text may end there. If nothing is
        allowed, the completion ends.
        """

    def accept(self, token: int) -> None:
        """Go on behind a sampled token, which was allowed and does not end the completion."""


class Grammar(Protocol):
    """Which texts a request's completions may have. Compiled before the engine gets it."""

    def start(self) -> TokenMask:
        """The beginning, anew for each completion. Called on the device thread: must be cheap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens. Zero temperature is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    max_tokens: int
    """0: the prompt is computed, and nothing sampled."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0
    """How many most likely tokens to report beside each sampled one."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that the completion has."""
    frequency_penalty: float = 0.0
    """Taken from it for each time that the completion has it."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens that prompt or completion have are divided by this, others multiplied."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits."""
    min_tokens: int = 0
    """Before so many tokens nothing but `max_tokens` and the context ends the completion."""
    prompt_logprobs: int | None = None
    """How many most likely tokens to report beside each token of the prompt; 0: the token alone; None: nothing.

    After temperature, as those of sampled tokens."""
    grammar: Grammar | None = None
    """Restricts which tokens are sampled; log-probabilities stay those of the policy itself."""

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def has_logits_processors(self) -> bool:
        """Whether tokens are sampled from other logits than the policy's own."""
        return bool(self.has_penalties or self.logit_bias or self.min_tokens or self.grammar)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt, `n` completions. The prompt is computed once and its rows fork from it."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    model: str = POLICY
    """`base`, `policy` (the version that is served), `policy@12`, `latest`, `best`, `poet`; see `model_names`."""
    traffic: TrafficClass = "serving"
    switches_in_flight: bool = False
    """Go on with what `model` means by then from the next token on, instead of the version that it began with."""
    priority: int = 0
    """Of waiting requests the one with the lowest number goes first."""
    user: str | None = None
    """Whom a client asks for, where it says so: requests of one user get the same side of a split."""
    split: str | None = None
    """The name that was asked for, where a split of it has chosen `model`."""
    is_continued: bool = True
    """Whether a later prompt may go on from what it samples, as the next turn of a conversation does: then the engine
    keeps what it has computed for that."""
    cache_salt: str = ""
    """Only requests with the same one share keys and values of equal beginnings."""

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every position of the prompt has to be computed, whatever is cached of it."""
        return self.sampling.prompt_logprobs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpan:
    """Tokens `start` to `end` (half-open) of a completion were made by adapter version `version`; 0 is the base."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One alternative at a position: token id and its log-probability."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprob:
    """How likely a token of the prompt was behind those before it."""

    token: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished completion. `tokens` are exactly those sampled, the end-of-sequence token included."""

    request_id: str
    index: int
    """Which of the request's `n`."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """float32, after temperature, one per token."""
    top_logprobs: tuple[tuple[TopLogprob, ...], ...]
    text: str
    """Decoded tokens without the end token and cut before a stop string."""
    finish_reason: FinishReason
    weight_versions: tuple[WeightSpan, ...]
    prompt_logprobs: tuple[PromptLogprob | None, ...] | None = None
    """One for each token of the prompt, None for the first, where they were asked for."""
    num_cached_prompt_tokens: int = field(default=0, compare=False)
    """Prompt tokens whose keys and values the engine had from before. Says how it was computed, not what: completions
    that differ in nothing else are equal."""
    num_draft_tokens: int = field(default=0, compare=False)
    """Tokens that were proposed ahead of the policy and checked by it."""
    num_accepted_tokens: int = field(default=0, compare=False)
    """Of these, those that it sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """What one engine step, or several, add to one completion; `completion` is set on the last event only."""

    request_id: str
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[TopLogprob, ...], ...]
    text: str
    """New text that is certain to stay: a possible beginning of a stop string is held back."""
    completion: Completion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    """Functions that the model wants called, where its problem has some; `content` is the text around them then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something to solve. `answer` is what the environment needs for scoring; it never reaches the model."""

    problem_id: str
    messages: tuple[Message, ...]
    answer: str
    level: int = 0
    environment: str = ""
    """Which of several mixed environments it belongs to."""
    tools: str = ""
    """Functions that the model may call, as JSON: a list as in OpenAI's API. For environments of several turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One scored episode, as the learner trains on it: sampled token ids and, between turns, those of replies."""

    problem_id: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True where the policy sampled the token and learns from it; the log-prob of other tokens may be 0."""
    logprobs: tuple[float, ...]
    temperature: float
    weight_versions: tuple[WeightSpan, ...]
    reward_parts: Mapping[str, float]
    reward: float
    text: str
    finish_reason: FinishReason
    token_advantages: tuple[float, ...] | None = None
    """Of each token, by whoever scored it; they count in place of what the reward is worth in its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyEpisode:
    """A completion that its environment has failed to score or to reply to; it is never trained on."""

    kind: str
    """The call that failed and how, as `score_raised` or `reply_timed_out`; or `no_tokens`."""
    detail: str
    text: str
    tokens: tuple[int, ...]
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """All trajectories of one problem; advantages are relative to this group. Mostly they have one prompt."""

    problem: Problem
    trajectories: tuple[Trajectory, ...]
    faulty: tuple[FaultyEpisode, ...] = ()
    """Completions of the same problem without a reward."""
    solve_rate: float | None = None
    """Share of right ones among the scored completions; None where none was scored."""

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(trajectory.reward for trajectory in self.trajectories)

    @property
    def has_signal(self) -> bool:
        """False if all rewards are equal and finite: the learner names what is not. Advantages of tokens are signal."""
        if any(any(one.token_advantages or ()) for one in self.trajectories):
            return True
        return len(set(self.rewards)) > 1 or not all(map(math.isfinite, self.rewards))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequest:
    """Completions of one prompt, each of which a reward model scores at its last token."""

    prompt_tokens: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_tokens) + sum(map(len, self.completions))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCard:
    """What is known of one adapter version in memory, for lists and status pages."""

    name: str
    version: int
    parent: int | None
    step: int
    rank: int
    alpha: float
    aliases: tuple[str, ...]
    digest: str
    num_running: int
    """Sequences that use this version now."""
    is_served: bool
    """Whether the bare name means this version."""
    rslora: bool = False
    is_dora: bool = False
    num_bytes: int = 0
    """Size of the adapter's arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTrajectory:
    """A completion with its reward. Programs that sampled elsewhere may not know its log-probs and versions."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    reward: float
    group: str | None
    """Trajectories of the same group are compared; None: those of the same prompt."""
    logprobs: tuple[float, ...] | None
    """Log-probs of `tokens` when they were sampled; None: not known."""
    weight_versions: tuple[WeightSpan, ...]
    """Ranges of `tokens`, each with the version that sampled it; empty: not known."""
    loss_mask: tuple[bool, ...]
    temperature: float
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpdate:
    """One update on given trajectories, between two steps of training."""

    version: int
    """The newest version after it."""
    is_served: bool
    """Whether the policy's bare name means this version."""
    has_moved: bool
    """False if the update left every weight what it was to the last bit: `version` is the one before it."""
    num_trajectories: int
    num_trained: int
    """Trajectories of groups whose rewards differ."""
    num_recomputed: int
    """Trajectories without log-probs, which count as samples of the version before this one."""
    num_tokens: int
    """Tokens that were trained on."""
    loss: float
    gradient_norm: float
    kl_to_behaviour: float
    """Mean of the k3 estimator between the policy before the update and the one that sampled; 0 where log-probs were
    computed anew."""
    skipped: str | None
    """Why nothing was changed, if it was not."""
    checkpoint: str | None
    """The folder that it was saved in, if that was asked for."""
