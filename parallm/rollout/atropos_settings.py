"""Settings of the processes of an Atropos run that this one starts, watches and ends."""

from typing import Any, Literal

from pydantic import Field

from parallm.settings import settings


@settings
class EnvironmentProcess:
    """A script with an environment in it, unmodified."""

    script: str
    """File of the script; a relative one lies below `folder`. `{recipes}` is the folder of the recipes that come with
    ParaLLM."""
    arguments: tuple[str, ...] = ("serve", "--config", "{config}")
    """`{config}` is a file with all that an environment of this run has to know, `{api}` the URL of run-api, `{server}`
    ours, and `{tokenizer}` the model's folder."""
    folder: str = "."
    """Folder in which the script runs; environments look for data and for modules of their own there."""
    env: dict[str, Any] = Field(default_factory=dict)
    """Keys of its own configuration, over those that follow from this run; `{config}` holds them as `env:`."""
    openai: dict[str, Any] = Field(default_factory=dict)
    """Keys of its configuration for asking us for completions, over those that follow from this run."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables, over ours."""


@settings
class StartSettings:
    """Of `rollout.atropos.start`."""

    api: bool = False
    """Whether run-api is started, on the port of `rollout.atropos.url`; else one that runs is joined."""
    python: str | None = None
    """An interpreter that has atroposlib; null: the one that runs this."""
    environments: dict[str, EnvironmentProcess] = Field(default_factory=dict)
    """Environments to start, by name; each writes a log of its name. Others may join."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts of one process that ends within a minute each time; then it is given up."""
    why_seconds: float = Field(default=30.0, gt=0)
    """Without a batch for so long, the log says why."""


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
