"""Settings of rollouts: the source of training data, the size of a step, and rewards beside the environment's."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from parallm.settings import settings

LOCAL = "local"
"""The engine of this process among `rollout.engines`."""


@settings
class CurriculumSettings:
    by: Literal["off", "problem", "level"] = "off"
    """Solve rate that decides how often a problem is drawn: its own, or that of its level."""
    window: int = Field(default=16, ge=1)
    """Number of last groups over which the solve rate is the mean."""
    low: float = Field(default=0.1, ge=0, le=1)
    """Problems whose solve rate is below `low` or above `high` are drawn less often."""
    high: float = Field(default=0.9, ge=0, le=1)
    """Problems whose solve rate is below `low` or above `high` are drawn less often."""
    keep: float = Field(default=0.25, ge=0.01, le=1)
    """Share of the draws of such a problem that still counts, so that its rate is seen to change."""

    @model_validator(mode="after")
    def _low_is_below_high(self) -> "CurriculumSettings":
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}")
        return self


@settings
class RewardModelSettings:
    adapter: str | None = None
    """A reward model that learner=reward_model has trained on the same base: the folder of a run, of which the best
    version counts, RUN@VERSION, a checkpoint or an adapter. Its score is the reward part `rollout/reward_model`."""
    weight: float = 1.0
    """Weight of the reward part `rollout/reward_model`."""


@settings
class LiveSettings:
    """How `rollout.source=live` groups and scores what clients send."""

    group_by: Literal["prompt", "request", "none"] = "prompt"
    """Completions that are compared with each other: those of the same prompt, those of one request's `n`, or all of a
    step, which needs learner.advantage=reinforce_pp."""
    wait_seconds: float = Field(default=60.0, gt=0)
    """Longest time that a reward waits for others. After it a group of fewer than `group_size` counts, two at least,
    and a step begins with fewer groups than `problems_per_step`, one at least."""
    max_trajectories: int = Field(default=4096, ge=1)
    """Trajectories in the buffer; the oldest go first, and those with a reward last."""
    max_age_seconds: float = Field(default=3600.0, gt=0)
    """Older trajectories leave the buffer, with a reward or without. Time between two processes does not count."""
    max_metadata_bytes: int = Field(default=4096, ge=0)
    """Bytes of the metadata of one trajectory, as JSON."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weights of reward parts by name; a part that is not named weighs 1."""
    scoring_functions: dict[str, str] = Field(default_factory=dict)
    """Names that clients may ask for beside those of environments, each with `package.module:function`."""


@settings
class EnvironmentProcess:
    """One environment of Atropos: an unmodified script."""

    script: str
    """File of the script; a relative one lies below `folder`. `{recipes}` is the folder of the recipes that come with
    ParaLLM."""
    arguments: tuple[str, ...] = ("serve", "--config", "{config}")
    """`{config}` is a file with all that an environment of this run has to know, `{api}` the URL of run-api, `{server}`
    that of this process, and `{tokenizer}` the model's folder."""
    folder: str = "."
    """Folder in which the script runs; environments look for data and for modules of their own there."""
    env: dict[str, Any] = Field(default_factory=dict)
    """Keys of its own configuration, over those that follow from this run; `{config}` holds them as `env:`."""
    openai: dict[str, Any] = Field(default_factory=dict)
    """Keys of its configuration for asking this process for completions, over those that follow from this run."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables, over those of this process."""


@settings
class StartSettings:
    """Processes of an Atropos run that this one starts, watches and ends."""

    api: bool = False
    """Whether run-api is started, on the port of `rollout.atropos.url`; else one that runs is joined."""
    python: str | None = None
    """An interpreter that has atroposlib; null: the one that runs this."""
    environments: dict[str, EnvironmentProcess] = Field(default_factory=dict)
    """Environments to start, by name; each writes a log of its name. Others may join."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts of one process that ends within a minute each time; then it is given up."""
    why_seconds: float = Field(default=30.0, gt=0)
    """Seconds without a batch after which the log says why."""


@settings
class AtroposSettings:
    """How `rollout.source=atropos` takes part in an Atropos run.

    A batch is `rollout.problems_per_step` x `rollout.group_size` sequences.
    """

    url: str = Field(default="http://127.0.0.1:8001", pattern=r"^https?://")
    """Address of `run-api`, which brings environments and trainer together."""
    max_token_len: int = Field(default=2048, ge=2)
    """Longest sequence that is trained on, prompt included; environments drop those that reach it."""
    unmatched: Literal["drop", "recompute"] = "drop"
    """Fate of a group with trained tokens that were not sampled here, or too long ago: it is dropped, or its log-probs
    are taken to be those of the policy at the time of the step."""
    reset: bool = False
    """Whether an API that holds the sizes of another trainer may be emptied, with all that environments have posted."""
    poll_seconds: float = Field(default=0.2, gt=0)
    """Seconds between two questions for a batch."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Longest time of one question for a batch."""
    ledger_tokens: int = Field(default=8_000_000, ge=1)
    """Tokens of prompts and completions that are remembered, 8 bytes each; the oldest completions go first."""
    ledger_seconds: float = Field(default=7200.0, gt=0)
    """Older completions are forgotten."""
    start: StartSettings = StartSettings()
    """Processes that this run starts itself."""


@settings
class EpisodeSettings:
    """How one problem is answered and scored, in training and in evaluations."""

    max_tokens: int = Field(default=256, ge=1)
    """Tokens of a whole episode: all turns of the model and the replies between them."""
    max_turns: int = Field(default=8, ge=1)
    """Turns of the model in an episode with an environment that replies."""
    score_seconds: float = Field(default=30.0, gt=0)
    """Longest time of one call of an environment's `score` or `reply`; the completion is left out of training then."""
    reward_model: RewardModelSettings = RewardModelSettings()
    """A trained reward model whose score is part of the reward."""


@settings
class RolloutSettings(EpisodeSettings):
    source: Literal["environment", "live", "atropos"] = "environment"
    """Origin of what is trained on: completions of the environment's problems, of clients that ask for it, or what the
    environments of an Atropos run post."""
    live: LiveSettings = LiveSettings()
    """How `rollout.source=live` makes steps of what clients send."""
    atropos: AtroposSettings = AtroposSettings()
    """How `rollout.source=atropos` takes part in an Atropos run."""
    engines: tuple[str, ...] = ()
    """Addresses of `python -m parallm.serve` on other machines, such as `http://node:8000`, that sample for this run;
    they may come and go. `local` among them is this process's own engine, which alone samples if there are none. The
    key for all is that of the environment variable PARALLM_API_KEY."""
    problems_per_step: int = Field(default=16, ge=1)
    """Problems of a step; each is answered `group_size` times."""
    group_size: int = Field(default=8, ge=2)
    """Completions of a problem, which are compared with each other."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of sampling. top_p, top_k and min_p stay off: with them the sampled distribution is not the policy
    that is trained."""
    refill_rounds: int = Field(default=3, ge=0)
    """How often groups without signal (all rewards equal) are replaced by groups of the next problems."""
    refill_below: float = Field(default=0.5, ge=0, le=1)
    """Groups are replaced only while less than this share of the step's groups has signal; 1: always, as in DAPO."""
    switch_in_flight: bool = False
    """Move running completions to a new version from their next token on; else they end on the one they began with.
    Matters only where trainer.max_off_policy_steps is above 0."""
    max_idle_steps: int = Field(default=50, ge=1)
    """Steps in a row without any group with signal, after which training stops and says so."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Number of tokens before `max_tokens` over which the reward falls in a line by `overlong_weight`; 0 is off."""
    overlong_weight: float = Field(default=1.0, ge=0)
    """Loss of reward at `max_tokens`; see `overlong_buffer`."""
    length_weight: float = Field(default=0.0, ge=0)
    """Loss of reward of a right answer of `max_tokens` tokens; shorter ones lose in proportion."""
    mask_truncated: bool = False
    """Whether completions that end at `max_tokens` are left out of the gradient."""
    curriculum: CurriculumSettings = CurriculumSettings()
    """Draw problems that are too easy or too hard less often."""

    @field_validator("engines")
    @classmethod
    def _are_addresses(cls, engines: tuple[str, ...]) -> tuple[str, ...]:
        for engine in engines:
            if engine != LOCAL and not re.fullmatch(r"https?://[^/?#\s]+/?", engine):
                raise ValueError(f"should hold {LOCAL} and addresses such as http://node:8000, which {engine} is not")
        if twice := {engine for engine in engines if engines.count(engine) > 1}:
            raise ValueError(f"should name each engine once; {min(twice)} stands there twice")
        return engines

    @model_validator(mode="after")
    def _buffer_fits(self) -> "RolloutSettings":
        if self.overlong_buffer > self.max_tokens:
            raise ValueError(f"overlong_buffer={self.overlong_buffer} must be at most max_tokens={self.max_tokens}")
        return self
