"""Reports of the parts about their work, for logs, figures and status pages: frozen, without arrays."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FaultKind = Literal["reward", "behaviour", "advantage", "logprob", "loss", "gradient", "weights"]
"""The quantity that was not finite in an update; `behaviour` is the log-probs that the engine sampled with."""

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
    """Differences between the learner's log-probs before the update and those that the engine sampled with.

    Counts tokens that the learner's present version sampled over its own keys and values; others differ by right. NaN
    if there are none.
    """

    num_tokens: int = 0
    bit_equal_fraction: float = math.nan
    mean_abs: float = math.nan
    max_abs: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioReport:
    """Probability of a token under the learner's version before the update, divided by that when it was sampled.

    Counts the trained tokens that parity leaves out. NaN if there are none.
    """

    num_tokens: int = 0
    mean: float = math.nan
    smallest: float = math.nan
    largest: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyReport:
    """Age of the tokens of a step when they were trained on."""

    lag_mean: float
    """Mean number of versions between the learner's and the one that sampled a token, over trained tokens."""
    lag_max: int
    dropped: int
    """Number of groups older than the limit, which were sampled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A trajectory that made an update change nothing."""

    problem_id: str
    group: int
    """Index of its group in the update."""
    index: int
    """Index in its group."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsReport:
    """Scores of a step's pairs by a reward model before the update."""

    accuracy: float
    """Share of pairs whose chosen completion has the higher score."""
    margin: float
    """Mean score of the chosen completions minus that of the rejected ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """The result of one optimizer step. `skipped` is the reason if it changed nothing.

    Numbers that a skipped step did not compute are NaN.
    """

    step: int
    version: int
    """Adapter version that this update made."""
    loss: float
    gradient_norm: float
    learning_rate: float
    clip_fraction: float = math.nan
    kl_to_behaviour: float = math.nan
    """Mean of the k3 estimator between the learner's policy and the sampling one."""
    entropy: float = math.nan
    num_tokens: int
    """Completion tokens trained on."""
    seconds: float
    """Device seconds of the update, without waiting for the engine."""
    parity: ParityReport = ParityReport()
    ratio: RatioReport = RatioReport()
    skipped: str | None = None
    fault: FaultKind | None = None
    """The quantity that was not finite; None if the step was skipped because there was nothing to learn."""
    culprits: tuple[Culprit, ...] = ()
    """Trajectories to blame for the fault, if known."""
    left_out: tuple[Culprit, ...] = ()
    """Trajectories that the update left out because float32 cannot hold their rewards."""
    kl_to_base: float | None = None
    """Mean of the k3 estimator between the learner's policy and the base; None if the objective does not need it."""
    adapter_norm: float = math.nan
    """Norm of all arrays of the adapter, before the update."""
    adapter_delta_norm: float = math.nan
    """Norm of the change of all arrays of the adapter."""
    has_moved: bool = True
    """False if no weight changed by a bit, so that there is no new version."""
    pairs: PairsReport | None = None
    """Set for reward models, whose clipping, KL, entropy, parity and ratios are NaN."""

    @property
    def adapter_delta_relative(self) -> float:
        """Norm of the adapter's change divided by its norm."""
        return self.adapter_delta_norm / self.adapter_norm if self.adapter_norm else math.nan


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems with its 95% interval; NaN if nothing was measured. Example: `Estimate(0.5, 0.4, 0.6)`."""

    mean: float
    low: float
    high: float


UNKNOWN = Estimate(math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """The evaluation of a version on held-out problems, by greedy completions and by samples, or on held-out data."""

    step: int
    version: int
    num_problems: int = 0
    """Number of problems or pairs; 0 if only demonstrations are held out."""
    accuracy: float = math.nan
    """Share of correct greedy completions, with its 95% interval from `low` to `high`."""
    low: float = math.nan
    high: float = math.nan
    reward: Estimate = UNKNOWN
    """Mean reward of the greedy completions; `reward_parts` has the means of its parts."""
    reward_parts: Mapping[str, Estimate] = field(default_factory=dict)
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    """Probability by k that one of k samples is correct; empty without samples."""
    num_samples: int = 0
    """Number of samples of each problem."""
    temperature: float = 0.0
    """Temperature of the samples."""
    margin: Estimate | None = None
    """Mean score of the chosen completion minus that of the rejected one, for reward models. `accuracy` is then the
    share of pairs whose chosen completion scores higher, `reward` the mean score of all completions."""
    loss: float | None = None
    """Nats per token of held-out demonstrations, or per pair of a reward model; None without both."""
    num_demonstrations: int = 0

    @property
    def is_of_loss(self) -> bool:
        """Whether only demonstrations were evaluated on."""
        return self.loss is not None and not self.num_problems

    @property
    def score(self) -> float:
        """Number by which versions are compared, higher is better: accuracy, or minus the loss without one."""
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
    """0 with empty `parts` if the completion could not be scored."""
    parts: Mapping[str, float]
    finish_reason: str
    num_tokens: int
    sample: int | None = None
    """Index among the samples of its problem; None for the greedy completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A report and its completions in the order of the problems."""

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
    """Loss of the last update."""
    trajectories_collected: int = 0
    """Trajectories that steps have taken since the process began; for live traffic, those that clients marked."""
    checkpoint_saves: int = 0
    """Checkpoints written since the process began."""
    training_enabled: bool = False
    """Whether further steps are planned. The status route sets this field and the next ones."""
    current_lora: str | None = None
    """Served version, such as `checkpoint-12`; None: the base."""
    available_checkpoints: tuple[str, ...] = ()
    """Versions in memory, such as `checkpoint-12`."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """`serving_share`, `engine_share` and, if there is one, `serving_latency_target` of the device."""
    policies: Mapping[str, "TrainingStatus"] = field(default_factory=dict)
    """Status by policy if several are trained; the fields above are then about the one with the most steps left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryReport:
    """Counts of the completions that clients have marked for training, for one policy."""

    num_waiting: int
    """Completions in the buffer without a reward."""
    num_rewarded: int
    """Completions in the buffer with a reward."""
    num_reserved: int = 0
    """Completions of steps that no checkpoint holds yet: they are in the buffer again if the process ends."""
    oldest_seconds: float
    """Age of the oldest completion in the buffer; 0 if it is empty."""
    num_collected: int
    """Completions since the run began, like the next two fields."""
    num_trained: int
    """Completions of steps that a checkpoint holds."""
    dropped: Mapping[str, int]
    """Dropped completions by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionReport:
    """Answers of one version since the process began, for one of the names that clients ask for."""

    num_requests: int
    num_completions: int
    num_tokens: int
    num_rewards: int
    reward_mean: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """A name, the shares of its requests by model (empty if it is not split), and its versions."""

    name: str
    shares: Mapping[str, float]
    versions: Mapping[str, VersionReport]
