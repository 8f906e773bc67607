"""Settings of what a run reports."""

from typing import Literal

from parallm.settings import settings


@settings
class MetricsSettings:
    display: Literal["auto", "live", "lines", "off"] = "auto"
    """`auto`: a live table on a terminal, one line per step elsewhere."""
    samples_per_step: int = 4
    """Completions per step written to samples.jsonl."""
    wandb: Literal["off", "online", "offline"] = "off"
    wandb_project: str = "parallm"
    figures: str | None = None
    """Prefix of the figures in summary.json; null: the run's name."""
