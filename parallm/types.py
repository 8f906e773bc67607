"""The nouns that parts hand to each other: frozen dataclasses without arrays and without words of HTTP.

Every part may import them. Each docstring ends with an example.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from parallm.conversation import ToolCall

TrafficClass = Literal["serving", "rollout"]
FinishReason = Literal["stop", "length", "abort"]
TrajectoryState = Literal["waiting", "rewarded", "trained", "dropped"]
Split = Literal["train", "test"]
Pooling = Literal["cls", "last", "mean", "max", "mean_sqrt_len", "weighted_mean"]
Task = Literal["embed", "score", "classify"]
"""What is made of a text: a vector, one number, or a number for each label."""
TASK_ROUTES: Mapping[Task, str] = {"embed": "/v1/embeddings", "score": "/rerank or /score", "classify": "/classify"}
Activation = Literal["none", "sigmoid", "softmax"]

BASE = "base"
"""Name that requests use for the frozen model without an adapter."""
POLICY = "policy"
"""Name of the adapter that the learner trains, unless it trains several."""
LATEST = "latest"
"""Alias of the newest version, whether it is served already or not."""
BEST = "best"
"""Alias of the best version by evaluation."""


class TokenMask(Protocol):
    """The state of one completion in its grammar. Used on the device thread, between steps; must not raise.

    Example: inside of a JSON number, `allowed()` has bits for the tokens of digits, `.`, `e`, `,` and `}`.
    """

    def allowed(self) -> bytes:
        """Return one bit for each token id that may come next, the lowest bit of the first byte first.

        Ids beyond its end are not allowed. The model's end tokens are allowed where the text may end. The completion
        ends if nothing is allowed.
        """

    def accept(self, token: int) -> None:
        """Advance by a sampled token, which was allowed and does not end the completion."""


class Grammar(Protocol):
    """The texts that completions of a request may have. Compiled before the engine gets it.

    Example: what `compile_grammar` makes of the JSON schema `{"type": "integer"}`.
    """

    def start(self) -> TokenMask:
        """Return the state before the first token. Called for each completion on the device thread: must be cheap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens. Zero temperature is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off.

    Example: `SamplingParams(max_tokens=256, temperature=0.7, top_p=0.95, seed=1, stop=("\\n\\n",))`.
    """

    max_tokens: int
    """0 computes the prompt and samples nothing."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0
    """Number of most likely tokens to report beside each sampled one."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the completion has."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time that the completion has it."""
    repetition_penalty: float = 1.0
    """Divides positive logits and multiplies negative ones of tokens that prompt or completion have."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and a number that is added to its logit."""
    min_tokens: int = 0
    """Number of tokens before which only `max_tokens` and the context end the completion."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to report beside each token of the prompt; 0: the token alone; None: nothing.

    Their log-probs are taken after temperature, like those of sampled tokens."""
    grammar: Grammar | None = None
    """Restricts the sampled tokens; log-probs stay those of the policy itself."""

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def has_logits_processors(self) -> bool:
        """Whether tokens are sampled from other logits than the policy's own."""
        return bool(self.has_penalties or self.logit_bias or self.min_tokens or self.grammar)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt with `n` completions. The engine computes the prompt once and forks its sequences from it.

    Example: `GenerationRequest(request_id="chatcmpl-7", prompt_tokens=(1, 27, 11),
    sampling=SamplingParams(max_tokens=8), n=4, model="policy@12", traffic="rollout")`.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    model: str = POLICY
    """`base`, `policy` (the served version), `policy@12`, `latest`, `best`, `poet`; see `model/adapters/table.py`."""
    traffic: TrafficClass = "serving"
    switches_in_flight: bool = False
    """Follow `model` to a newly published version from the next token on, instead of keeping the first version."""
    priority: int = 0
    """The waiting request with the lowest number is admitted first."""
    user: str | None = None
    """End user that a client names: all requests of one user get the same side of a split."""
    split: str | None = None
    """Name that the client asked for, if a split of it has chosen `model`."""
    is_continued: bool = True
    """Whether a later prompt may continue its completions, as the next turn of a chat does: the engine then caches the
    keys and values of what it samples."""
    cache_salt: str = ""
    """Only requests with equal salts share cached keys and values of equal prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpan:
    """Adapter version `version` sampled the tokens `start` to `end` (half-open) of a completion; 0 is the base.

    Example: `WeightSpan(version=12, start=0, end=40)`.
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One alternative at a position. Example: `TopLogprob(token=42, logprob=-0.1)`."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprob:
    """The log-prob of a prompt token after those before it.

    Example: `PromptLogprob(token=42, logprob=-0.1, rank=1, top=(TopLogprob(42, -0.1),))`.
    """

    token: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished completion. `tokens` are exactly those sampled, the end-of-sequence token included.

    Example: `Completion(request_id="chatcmpl-7", index=0, tokens=(5, 9, 2), logprobs=(-0.1, -0.7, -0.01),
    top_logprobs=((), (), ()), text="42", finish_reason="stop",
    weight_versions=(WeightSpan(version=12, start=0, end=3),))`.
    """

    request_id: str
    index: int
    """Number of this completion among the request's `n`."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """float32, after temperature, one per token."""
    top_logprobs: tuple[tuple[TopLogprob, ...], ...]
    text: str
    """Decoded tokens without the end token and cut before a stop string."""
    finish_reason: FinishReason
    weight_versions: tuple[WeightSpan, ...]
    prompt_logprobs: tuple[PromptLogprob | None, ...] | None = None
    """One for each token of the prompt, None for the first; None if the request does not ask for them."""
    num_cached_prompt_tokens: int = field(default=0, compare=False)
    """Prompt tokens whose keys and values were cached. Says how the completion was computed, so that completions which
    differ in nothing else are equal."""
    num_draft_tokens: int = field(default=0, compare=False)
    """Speculated tokens that the policy has checked."""
    num_accepted_tokens: int = field(default=0, compare=False)
    """Speculated tokens that the policy has accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """What one or several engine steps add to one completion; only the last event has `completion`.

    Example: `TokenEvent(request_id="chatcmpl-7", index=0, tokens=(9,), logprobs=(-0.7,), top_logprobs=((),),
    text="4")`.
    """

    request_id: str
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[TopLogprob, ...], ...]
    text: str
    """New text. A possible beginning of a stop string is held back."""
    completion: Completion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat. Example: `Message(role="user", content="2 + 3?")`."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    """Functions that the model wants called; `content` is then the text around them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A task for the policy. The environment scores with `answer`, which never reaches the model.

    Example: `Problem(problem_id="gsm8k/train/7", messages=(Message(role="user", content="2 + 3?"),), answer="5")`.
    """

    problem_id: str
    messages: tuple[Message, ...]
    answer: str
    level: int = 0
    environment: str = ""
    """Name of its environment among several mixed ones."""
    tools: str = ""
    """Functions that the model may call, as JSON: a list as in OpenAI's API. Used by environments of several turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One scored episode, as the learner trains on it: sampled token ids and, between turns, those of replies.

    Example: `Trajectory(problem_id="gsm8k/train/7", prompt_tokens=(1, 27), tokens=(5, 2), loss_mask=(True, True),
    logprobs=(-0.1, -0.01), temperature=1.0, weight_versions=(WeightSpan(version=12, start=0, end=2),),
    reward_parts={"correct": 1.0}, reward=1.0, text="5", finish_reason="stop")`.
    """

    problem_id: str
    prompt_tokens: tuple[int, ...]
    tokens: Sequence[int]
    """A tuple, or an `ArrayRow`; so are the other numbers of tokens."""
    loss_mask: Sequence[bool]
    """True for tokens that the policy sampled and learns from; the log-prob of other tokens may be 0."""
    logprobs: Sequence[float]
    temperature: float
    weight_versions: tuple[WeightSpan, ...]
    reward_parts: Mapping[str, float]
    reward: float
    text: str
    finish_reason: FinishReason
    token_advantages: Sequence[float] | None = None
    """Advantage of each token, if the scorer sends them; they replace the advantage of the reward in its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyEpisode:
    """A completion that its environment failed to score or to reply to; it is never trained on.

    Example: `FaultyEpisode(kind="score_raised", detail="ZeroDivisionError: division by zero", text="5 / 0",
    tokens=(5, 2))`.
    """

    kind: str
    """The failed call and how it failed, such as `score_raised` and `reply_timed_out`; or `no_tokens`."""
    detail: str
    text: str
    tokens: tuple[int, ...]
    traceback: str = ""


CompletionIndex = tuple[int, int]
"""Index of a group among those of a step, and that of a completion in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """All trajectories of one problem, mostly with the same prompt; advantages are relative to this group.

    Example: `TrajectoryGroup(problem=problem, trajectories=(right, wrong, right, right), solve_rate=0.75)`.
    """

    problem: Problem
    trajectories: tuple[Trajectory, ...]
    faulty: tuple[FaultyEpisode, ...] = ()
    """Completions of the same problem without a reward."""
    solve_rate: float | None = None
    """Share of correct completions among the scored ones; None if none was scored."""

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(trajectory.reward for trajectory in self.trajectories)

    @property
    def has_signal(self) -> bool:
        """Whether an update can learn from this group: rewards differ, or tokens have advantages.

        A group with a reward that is not finite counts, so that the learner reports it.
        """
        if any(any(trajectory.token_advantages or ()) for trajectory in self.trajectories):
            return True
        return len(set(self.rewards)) > 1 or not all(map(math.isfinite, self.rewards))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequest:
    """Completions of one prompt, each of which a reward model scores at its last token.

    Example: `ScoringRequest(prompt_tokens=(1, 27), completions=((5, 2), (6, 2)))`.
    """

    prompt_tokens: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_tokens) + sum(map(len, self.completions))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """What a model or an adapter makes of texts, and how.

    Examples: `TaskSpec(pooling=("last",), dimensions=(), prompts={"query": "Query: "}, source="modules.json")`,
    `TaskSpec(task="classify", pooling=("cls",), labels=("bad", "good"), activation="softmax", source="config.json")`.
    """

    pooling: tuple[Pooling, ...]
    """Several give one vector after the other. A head reads what is pooled."""
    source: str
    """The file or key that says so, for people."""
    task: Task = "embed"
    activation: Activation = "none"
    """What is made of a head's logits."""
    labels: tuple[str, ...] = ()
    """Names of a head's numbers, in their order."""
    answers: tuple[int, ...] = ()
    """Token ids, such as those of yes and no, that are the head: the score is the logit of the first one, minus that of
    the second one if there is one."""
    template: str = ""
    """Text of a pair with {query} and {document}, perhaps {instruction}; empty: as the tokenizer joins two texts."""
    normalizes: bool = True
    """Whether vectors have the length 1."""
    dimensions: tuple[int, ...] | None = None
    """Sizes that vectors may be cut to; empty: all; None: the model was not trained for it."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts to put before a text, by name."""
    default_prompt: str | None = None
    """Name of the prompt of texts that come without one."""
    max_tokens: int | None = None
    """Tokens of a text that the model was trained for, if fewer than its positions."""
    end_token: int | None = None
    """Token id that texts for vectors get at their end; None: as the tokenizer or `tasks.end_token` says."""
    dense: tuple[str, ...] = ()
    """Folders below the model's, such as 2_Dense, of the layers that a pooled vector goes through, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRequest:
    """Rows of token ids that become vectors, or a head's numbers.

    Example: `EncodeRequest(model="poet@3", rows=((1, 27), (1, 9, 4)), dimensions=256)`.
    """

    model: str
    rows: tuple[tuple[int, ...], ...]
    first_lengths: tuple[int, ...] = ()
    """Tokens of each row that belong to the first of two texts, for encoders that tell them apart; empty: all do."""
    dimensions: int | None = None
    """Numbers that are kept of each vector; None: all."""
    activates: bool = True
    """False leaves vectors as long as they are, and a head's numbers as logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCard:
    """Metadata of one adapter version in memory, for lists and status pages.

    Example: `AdapterCard(name="policy", version=12, parent=11, step=12, rank=16, alpha=32.0, aliases=("best",),
    digest="9f2c...", num_running=3, is_served=True)`.
    """

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
    task: TaskSpec | None = None
    """What it makes of texts; None: it writes text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTrajectory:
    """A completion with its reward from a client, which may not know log-probs and versions.

    Example: `GivenTrajectory(prompt_tokens=(1, 27), tokens=(5, 2), reward=1.0, group=None, logprobs=None,
    weight_versions=(), loss_mask=(True, True), temperature=1.0, text="5", finish_reason="stop")`.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    reward: float
    group: str | None
    """Trajectories of one group are compared with each other; None groups by prompt."""
    logprobs: tuple[float, ...] | None
    """Log-probs of `tokens` when they were sampled; None: unknown."""
    weight_versions: tuple[WeightSpan, ...]
    """Ranges of `tokens`, each with the version that sampled it; empty: unknown."""
    loss_mask: tuple[bool, ...]
    temperature: float
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpdate:
    """The result of one update on a client's trajectories, between two steps of training.

    Example: `GivenUpdate(version=13, is_served=True, has_moved=True, num_trajectories=8, num_trained=4,
    num_recomputed=0, num_tokens=512, loss=0.1, gradient_norm=0.3, kl_to_behaviour=0.0, skipped=None, checkpoint=None)`.
    """

    version: int
    """The newest version after it."""
    is_served: bool
    """Whether the policy's bare name means this version."""
    has_moved: bool
    """False if no weight changed by a bit: `version` is then the one before the update."""
    num_trajectories: int
    num_trained: int
    """Trajectories of groups whose rewards differ."""
    num_recomputed: int
    """Trajectories without log-probs, which are recomputed as samples of the version before this one."""
    num_tokens: int
    """Tokens that were trained on."""
    loss: float
    gradient_norm: float
    kl_to_behaviour: float
    """Mean of the k3 estimator between the policy before the update and the one that sampled; 0 for recomputed
    log-probs."""
    skipped: str | None
    """Why the update changed nothing, if so."""
    checkpoint: str | None
    """Folder of the checkpoint, if one was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentTrajectory:
    """A completion that a client has marked for training, or what is known of one that has left the buffer.

    Example: `RecentTrajectory(id="cmpl-7-0", state="waiting", age=4.0, version=12, text="5", finish_reason="stop",
    prompt_tokens=(1, 27))`.
    """

    id: str
    state: TrajectoryState
    """`trained` also in a step that no checkpoint holds yet."""
    reason: str | None = None
    """Why it was dropped."""
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    waited: float | None = None
    """Seconds from its sampling to its first reward."""
    age: float | None = None
    """Seconds since it was sampled; like all that follows None or empty once it has left the buffer."""
    version: int | None = None
    """Version that sampled its last token."""
    step: int | None = None
    """Step that learns from it, before a checkpoint holds that step."""
    text: str | None = None
    finish_reason: FinishReason | None = None
    prompt_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One completion that the engine works on. Example: `EngineRow(request_id="chatcmpl-7", index=0, ...)`."""

    request_id: str
    index: int
    """Index among the completions of its request."""
    traffic: TrafficClass
    model: str
    """`base` or an exact version, such as `policy@12`."""
    is_running: bool
    """Whether it decodes; else its prompt waits or is computed."""
    num_prompt_tokens: int
    num_sampled: int
    max_tokens: int
    seconds: float
    """Since its request arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Load and totals of the engine, such as 3 running and 1 waiting; totals count since its start."""

    num_running: int
    """Completions that decode now."""
    num_waiting: int
    """Requests that wait for rows."""
    tokens_total: Mapping[TrafficClass, int]
    """Sampled tokens."""
    max_rows: int
    """Completions that can decode at the same time."""
    kv_bytes: int
    """Bytes of keys, values and states, as of the last unit of work."""
    kv_bytes_limit: int
    num_preemptions: int
    """Times that a sequence or a prompt has given up its memory, to be computed again later."""
    prefix_bytes: int
    """Part of `kv_bytes` that the prefix cache holds."""
    num_prefix_lookups: int
    """Prompts that were looked up in the prefix cache."""
    num_prefix_hits: int
    prompt_tokens_total: int
    """Tokens of prompts that have begun; what preempted sequences compute again counts."""
    cached_prompt_tokens_total: int
    """Tokens of these that came from the prefix cache."""
    num_drafts: int
    """Times that a sequence was fed draft tokens."""
    draft_tokens_total: int
    accepted_draft_tokens_total: int
