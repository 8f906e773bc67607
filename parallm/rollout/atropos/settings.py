"""Settings of learning from the environments of an Atropos run."""

from typing import Literal

from pydantic import Field

from parallm.rollout.atropos.start.settings import StartSettings
from parallm.settings import settings


@settings
class AtroposSettings:
    """Of `rollout.source=atropos`. A batch is `rollout.problems_per_step` x `rollout.group_size` sequences."""

    url: str = Field(default="http://127.0.0.1:8001", pattern=r"^https?://")
    """Address of `run-api`, which brings environments and trainer together."""
    max_token_len: int = Field(default=2048, ge=2)
    """Longest sequence that is trained on, prompt included; environments drop those that reach it."""
    unmatched: Literal["drop", "recompute"] = "drop"
    """What becomes of a group with trained tokens that were not sampled here, or too long ago: it is left out, or its
    log-probs are taken to be those of the policy at the time of the step."""
    reset: bool = False
    """Whether an API that holds the sizes of another trainer may be emptied, with all that environments have posted."""
    poll_seconds: float = Field(default=0.2, gt=0)
    """Seconds between two questions for a batch."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Longest time of one question for a batch."""
    ledger_tokens: int = Field(default=8_000_000, ge=1)
    """Tokens of prompts and completions that are remembered, 8 bytes each; the oldest completions go first."""
    start: StartSettings = StartSettings()
    """Processes that this run starts itself."""
    ledger_seconds: float = Field(default=7200.0, gt=0)
    """Older completions are forgotten."""
