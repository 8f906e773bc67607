"""Settings of the training loop."""

from pydantic import Field

from parallm.settings import settings


@settings
class TrainerSettings:
    steps: int = Field(default=100, ge=1)
    max_off_policy_steps: int = Field(default=0, ge=0)
    """How many versions older than the learner's a trained token may be. 0: sample, then train, strictly in turns; with
    k, the groups of the next k steps are sampled while a step trains."""
    evaluate_every: int = Field(default=20, ge=0)
    """Steps between evaluations on held-out problems; 0: only before the first and after the last step."""
    evaluate_problems: int = Field(default=512, ge=0)
    """How many held-out problems an evaluation uses; 0 turns evaluation off."""
    patience: int = Field(default=0, ge=0)
    """Training ends after this many evaluations in a row that were no better than the best before; 0: never."""
    keep_best: bool = False
    """Write the best version by evaluation into the run's adapter folders at the end, instead of the newest."""
    keep_serving: bool = False
    """Go on answering HTTP after the last step until Ctrl-C."""
