"""Settings of what a run reports."""

from typing import Literal

from pydantic import Field

from parallm.settings import settings


@settings
class DisplaySettings:
    display: Literal["auto", "live", "lines", "off"] = "auto"
    """`auto`: a live table on a terminal, one line per step elsewhere."""


@settings
class MetricsSettings(DisplaySettings):
    samples_per_step: int = 4
    """Completions per step written to samples.jsonl."""
    samples_per_evaluation: int = Field(default=64, ge=0)
    """Greedy completions per evaluation written to evaluation_samples.jsonl, always of the same problems."""
    rollouts: Literal["off", "some", "all"] = "all"
    """Completions with the numbers of their tokens, written to rollouts/ beside the loop: those of all problems of a
    step, or of up to 4."""
    rollout_bytes: int = Field(default=256 * 1024 * 1024, ge=1024 * 1024)
    """Bytes of rollouts/ on disk; beyond them steps are thinned out evenly."""
    curves: bool = True
    """Draw curves.png as the run ends, which takes a second or two of a CPU."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases: `online` sends the metrics of each step there, `offline` keeps them in the run folder."""
    trackio: bool = False
    """Log to trackio on this machine; needs `parallm[trackio]`."""
    tensorboard: bool = False
    """Write event files for TensorBoard to `tensorboard/` in the run folder."""
    project: str = "parallm"
    """Project at Weights & Biases and in trackio."""
    figures: str | None = None
    """Prefix of the figures in summary.json; null: the run's name."""
