"""Settings of the training loop."""

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from parallm.settings import settings


@settings
class GuardSettings:
    max_skips: int = Field(default=3, ge=1)
    """Steps in a row with values that are not finite, after which the last good version comes back."""
    max_rollbacks: int = Field(default=2, ge=0)
    """Roll-backs of a run; training stops if one more is needed."""
    on_divergence: Literal["stop", "warn"] = "stop"
    """Reaction to signs that the policy falls apart; see trainer/guard.py."""
    min_entropy: float = Field(default=0.05, ge=0)
    """Nats a token; counts as low if it is also below a fifth of the entropy at the start."""
    max_kl: float = Field(default=0.05, gt=0)
    """Mean k3 a token between the policy that is trained and the one that sampled, for 5 updates in a row."""


@settings
class EvaluationSettings:
    """The problems and samples of an evaluation."""

    evaluate_problems: int = Field(default=512, ge=0)
    """Held-out problems, demonstrations or pairs of an evaluation; 0 turns evaluation off."""
    evaluate_samples: int = Field(default=0, ge=0)
    """Samples of each held-out problem for pass@k, beside the greedy completion; 0: none."""
    evaluate_temperature: float = Field(default=1.0, gt=0)
    """Temperature of the samples for pass@k."""
    evaluate_k: tuple[PositiveInt, ...] = ()
    """Values of k for pass@k; without any, 1 and `evaluate_samples`."""

    @model_validator(mode="after")
    def _enough_samples(self) -> "EvaluationSettings":
        if self.evaluate_samples and max(self.evaluate_k, default=1) > self.evaluate_samples:
            raise ValueError(
                f"evaluate_k={list(self.evaluate_k)} needs as many samples as its largest number; "
                f"raise evaluate_samples={self.evaluate_samples} or leave the number out"
            )
        return self


@settings
class TrainerSettings(EvaluationSettings):
    steps: int = Field(default=100, ge=1)
    """Updates of the adapter until training ends."""
    max_off_policy_steps: int = Field(default=0, ge=0)
    """How many versions older than the learner's a trained token may be. 0: sample, then train, strictly in turns; with
    k, the groups of the next k steps are sampled while a step trains."""
    evaluate_every: int = Field(default=20, ge=0)
    """Steps between evaluations on held-out problems; 0: only before the first and after the last step."""
    evaluate_on: Literal["auto", "data", "environment"] = "auto"
    """Evaluations of learner=sft beside the loss of held-out lines of learner.data: with `environment` they play its
    held-out problems, with `data` not, with `auto` where the command line or a recipe names an environment."""
    patience: int = Field(default=0, ge=0)
    """Training ends after this many evaluations in a row that were no better than the best before; 0: never."""
    keep_best: bool = False
    """Write the best version by evaluation into the run's adapter folders at the end, instead of the newest."""
    publish_if: Literal["always", "evaluation"] = "always"
    """`policy` moves to a new version after each update, or after an evaluation finds it good enough."""
    publish_margin: float = Field(default=0.02, ge=0, le=1)
    """How far below the best held-out accuracy so far a version may be, for publish_if=evaluation; without an accuracy,
    how far above the lowest held-out loss, in nats."""
    guard: GuardSettings = GuardSettings()
    """Rules by which a step is undone, and by which training stops by itself."""
    keep_serving: bool = False
    """Go on answering HTTP after the last step until Ctrl-C."""
