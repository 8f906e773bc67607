"""What parts report of their work, for logs, pictures and status pages: frozen, without arrays."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FaultKind = Literal["reward", "behaviour", "advantage", "logprob", "loss", "gradient", "weights"]
"""What was not finite in an update; `behaviour` are the log-probs that the engine sampled with."""


State = Literal[
    "serving",
    "starting",
    "collecting",
    "updating",
    "evaluating",
    "saving",
    "pausing",
    "paused",
    "finished",
    "failed",
]
"""State of a trainer. `pausing`: a pause waits for the end of the present step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """How far the learner's log-probs are from those that the engine sampled with, before the update.

    Only of tokens that the learner's present version sampled over keys and values of its own: for others the two differ
    by right. NaN where there are none.
    """

    num_tokens: int
    bit_equal_fraction: float
    mean_abs: float
    max_abs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioReport:
    """Probability of a token under the learner's present version over that when it was sampled, before the update.

    Of the trained tokens that parity leaves out. NaN where there are none.
    """

    num_tokens: int
    mean: float
    smallest: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyReport:
    """How old the tokens of a step were when they were trained on."""

    lag_mean: float
    """Versions between the learner's and the one that sampled a token, over the step's trained tokens."""
    lag_max: int
    dropped: int
    """Groups older than the limit, which were sampled anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A trajectory because of which an update changed nothing."""

    problem_id: str
    group: int
    """Its group's place among the groups of the update."""
    index: int
    """Its place in the group."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsReport:
    """How a reward model has scored the pairs of a step, before the update."""

    accuracy: float
    """Share of pairs whose chosen completion has the higher score."""
    margin: float
    """Mean of the chosen one's score less that of the rejected one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What one optimizer step did. `skipped` names the reason if nothing was changed.

    Numbers that were not computed, because the step was skipped before, are NaN.
    """

    step: int
    version: int
    """The adapter version that this update made."""
    loss: float
    gradient_norm: float
    learning_rate: float
    clip_fraction: float
    kl_to_behaviour: float
    """Mean of the k3 estimator between the learner's policy and the one that sampled."""
    entropy: float
    num_tokens: int
    """Completion tokens trained on."""
    seconds: float
    """Device seconds inside the update, waiting for the engine excluded."""
    parity: ParityReport
    ratio: RatioReport
    skipped: str | None = None
    fault: FaultKind | None = None
    """What was not finite; None where nothing was changed because there was nothing to learn."""
    culprits: tuple[Culprit, ...] = ()
    """The trajectories to blame for the fault, as far as they are known."""
    left_out: tuple[Culprit, ...] = ()
    """Trajectories whose reward float32 cannot hold; the update was made without them."""
    kl_to_base: float | None = None
    """Mean of the k3 estimator between the learner's policy and the base; None if no objective asked for it."""
    adapter_norm: float = math.nan
    """Norm of all arrays of the adapter, before the update."""
    adapter_delta_norm: float = math.nan
    """Norm of the change of these arrays."""
    has_moved: bool = True
    """False if an update that went well left every weight what it was to the last bit: there is no new version."""
    pairs: PairsReport | None = None
    """Of a reward model, to which clipping, KL, entropy, parity and ratios do not apply: they are NaN."""

    @property
    def adapter_delta_relative(self) -> float:
        """The change of the adapter as a share of its norm."""
        return self.adapter_delta_norm / self.adapter_norm if self.adapter_norm else math.nan


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems with its 95% interval; NaN where nothing was measured."""

    mean: float
    low: float
    high: float


UNKNOWN = Estimate(math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """What a version does on held-out problems, greedily and if asked for in several samples of each, or on held-out
    lines of the data that it is trained on."""

    step: int
    version: int
    num_problems: int = 0
    """Problems or pairs; 0 where only demonstrations were held out."""
    accuracy: float = math.nan
    """Of one greedy completion a problem, with its 95% interval from `low` to `high`."""
    low: float = math.nan
    high: float = math.nan
    reward: Estimate = UNKNOWN
    """Of the greedy completions, as `reward_parts`."""
    reward_parts: Mapping[str, Estimate] = field(default_factory=dict)
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    """By k: the chance that one of k samples is right; without entries where nothing was sampled."""
    num_samples: int = 0
    """Of each problem."""
    temperature: float = 0.0
    """Of the samples."""
    margin: Estimate | None = None
    """Of a reward model: by how much the chosen completion of a pair scores higher. Its `accuracy` is the share of
    pairs in which it does, its `reward` the mean score of all completions."""
    loss: float | None = None
    """Nats per token of held-out demonstrations, or per pair of a reward model; None where there are neither."""
    num_demonstrations: int = 0

    @property
    def is_of_loss(self) -> bool:
        """True where nothing but demonstrations was evaluated on."""
        return self.loss is not None and not self.num_problems

    @property
    def score(self) -> float:
        """Measure by which versions are compared, higher is better: accuracy, or the loss times -1 without one."""
        return -self.loss if self.loss is not None and self.is_of_loss else self.accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedCompletion:
    """One scored completion of a held-out problem, for people to read."""

    problem_id: str
    prompt: str
    completion: str
    answer: str
    is_correct: bool
    reward: float
    """0 for a completion that could not be scored, whose parts are empty."""
    parts: Mapping[str, float]
    finish_reason: str
    num_tokens: int
    sample: int | None = None
    """Which of several samples of its problem; None for the greedy completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A report and the completions that it is about, in the order of the problems."""

    report: EvaluationReport
    completions: Sequence[EvaluatedCompletion] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStatus:
    """A snapshot of the trainer for `GET /v1/training/status` and the progress display."""

    state: State
    step: int = 0
    total_steps: int = 0
    version: int = 0
    seconds_left: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    message: str = ""
    last_update: str | None = None
    """Time of the last update that changed the policy, as ISO 8601."""
    loss: float | None = None
    """Loss of that update."""
    trajectories_collected: int = 0
    """Trajectories that steps took since the process began; for live traffic, those that clients marked."""
    checkpoint_saves: int = 0
    """Checkpoints written since the process began."""
    training_enabled: bool = False
    """Whether further steps are planned. The status route sets this field and the next ones."""
    current_lora: str | None = None
    """Served version, such as `checkpoint-12`; None: the base."""
    available_checkpoints: tuple[str, ...] = ()
    """Versions in memory, such as `checkpoint-12`."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """`serving_share` and `engine_share` of the device."""
    policies: Mapping[str, "TrainingStatus"] = field(default_factory=dict)
    """Of each, by name, where several are trained; the fields above are then about the one with the most to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryReport:
    """What became of the completions that clients have asked to be learned from, of one policy."""

    num_waiting: int
    """In the buffer, without a reward."""
    num_rewarded: int
    """In the buffer, with one."""
    num_reserved: int = 0
    """Taken by steps that no checkpoint holds yet: the end of the process would let them wait again."""
    oldest_seconds: float
    """Age of the oldest one in the buffer; 0 if it is empty."""
    num_collected: int
    """Since the run began, as the next two."""
    num_trained: int
    """By steps that a checkpoint holds."""
    dropped: Mapping[str, int]
    """By reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionReport:
    """What one version has answered since the process began, by one of the names that clients asked for."""

    num_requests: int
    num_completions: int
    num_tokens: int
    num_rewards: int
    reward_mean: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """A name, the shares of its requests by model (none where it is not split), and its versions so far."""

    name: str
    shares: Mapping[str, float]
    versions: Mapping[str, VersionReport]
