"""The kinds of training, and the keys without effect in each."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Literal, Protocol

from parallm.environment.settings import ArithmeticSettings, EnvironmentSettings, Gsm8kSettings, MixedSettings
from parallm.learner.loss.objective import resolve_objective
from parallm.learner.settings import LearnerSettings
from parallm.metrics.settings import MetricsSettings
from parallm.registry.settings import RegistrySettings
from parallm.rollout.settings import RolloutSettings
from parallm.server.settings import ServerSettings
from parallm.trainer.settings import TrainerSettings

RunKind = Literal["rollouts", "live", "atropos", "sft", "reward_model", "embedding", "classifier"]
CHOICES: Mapping[RunKind, str] = {
    "rollouts": "rollout.source=environment",
    "live": "rollout.source=live",
    "atropos": "rollout.source=atropos",
    "sft": "learner=sft",
    "reward_model": "learner=reward_model",
    "embedding": "learner=embedding",
    "classifier": "learner=classifier",
}
"""Override that chooses each kind."""
SAMPLING_KEYS = (
    "rollout.engines",
    "rollout.temperature",
    "rollout.refill_rounds",
    "rollout.refill_below",
    "rollout.switch_in_flight",
    "rollout.max_idle_steps",
    "rollout.overlong_buffer",
    "rollout.overlong_weight",
    "rollout.length_weight",
    "rollout.mask_truncated",
    "rollout.curriculum",
)
POLICY_KEYS = (
    *SAMPLING_KEYS,
    "rollout.group_size",
    "trainer.max_off_policy_steps",
    "trainer.guard.on_divergence",
    "trainer.guard.min_entropy",
    "trainer.guard.max_kl",
)
ENVIRONMENT_KEYS = (
    "rollout.max_tokens",
    "rollout.max_turns",
    "rollout.score_seconds",
    "rollout.reward_model",
    "trainer.evaluate_samples",
    "trainer.evaluate_temperature",
    "trainer.evaluate_k",
)
TEXT_KEYS = ("learner.head_chunk_bytes", *ENVIRONMENT_KEYS)
UNSAMPLED_KEYS = ("rollout.live", "rollout.atropos", *POLICY_KEYS)
UNUSED: Mapping[RunKind, tuple[str, ...]] = {
    "rollouts": ("rollout.live", "rollout.atropos"),
    "live": ("rollout.atropos", *SAMPLING_KEYS),
    "atropos": ("rollout.live", *SAMPLING_KEYS),
    "sft": UNSAMPLED_KEYS,
    "reward_model": (*UNSAMPLED_KEYS, *TEXT_KEYS),
    "embedding": (*UNSAMPLED_KEYS, *TEXT_KEYS),
    "classifier": (*UNSAMPLED_KEYS, *TEXT_KEYS),
}
"""Keys that a kind of run does not read; a key stands for all keys below it."""


class RunParts(Protocol):
    """Parts of a run's configuration that its kind depends on."""

    @property
    def learner(self) -> LearnerSettings: ...

    @property
    def rollout(self) -> RolloutSettings: ...

    @property
    def trainer(self) -> TrainerSettings: ...

    @property
    def environment(self) -> EnvironmentSettings: ...


def kind_of(run: RunParts) -> RunKind:
    if run.learner.trains != "policy":
        return run.learner.trains
    if resolve_objective(run.learner).policy == "likelihood":
        return "sft"
    return "rollouts" if run.rollout.source == "environment" else run.rollout.source


def writes_text(kind: RunKind) -> bool:
    """Whether the adapter writes completions."""
    return kind not in ("reward_model", "embedding", "classifier")


def plays_environment(run: RunParts) -> bool:
    """Whether evaluations sample completions of the environment's held-out problems."""
    kind, chosen = kind_of(run), run.trainer.evaluate_on
    if kind != "sft":
        return writes_text(kind)
    return chosen == "environment" or (chosen == "auto" and run.environment != ArithmeticSettings())


def wrong_evaluation(run: RunParts) -> Iterator[str]:
    """Yield a line if the kind of run cannot be evaluated on `trainer.evaluate_on`."""
    kind, chosen = kind_of(run), run.trainer.evaluate_on
    if chosen == "data" and kind != "sft" and writes_text(kind):
        yield "trainer.evaluate_on=data is for learner=sft; a policy that samples has no data to hold out"
    if chosen == "environment" and not writes_text(kind):
        yield (
            f"trainer.evaluate_on=environment is for policies; {CHOICES[kind]} is evaluated on lines of its data, see "
            "learner.data_held_out"
        )


def may_have_turns(environment: EnvironmentSettings) -> bool:
    """Whether episodes of such environments may have several turns, as far as the settings tell."""
    if isinstance(environment, MixedSettings):
        return any(may_have_turns(part.environment) for part in environment.parts.values())
    return not isinstance(environment, ArithmeticSettings | Gsm8kSettings)


SWITCHES: Mapping[str, tuple[str, Callable[[RunParts], bool]]] = {
    "learner.data_reward_min": ("learner=sft", lambda run: kind_of(run) == "sft"),
    "learner.center_scores": ("learner=reward_model", lambda run: kind_of(run) == "reward_model"),
    **{
        f"learner.{key}": ("learner=embedding", lambda run: kind_of(run) == "embedding")
        for key in ("pooling", "scale", "dimensions")
    },
    "rollout.switch_in_flight": ("trainer.max_off_policy_steps", lambda run: run.trainer.max_off_policy_steps > 0),
    "rollout.max_turns": ("an environment of several turns", lambda run: may_have_turns(run.environment)),
    "rollout.overlong_weight": ("rollout.overlong_buffer", lambda run: run.rollout.overlong_buffer > 0),
    "rollout.reward_model.weight": (
        "rollout.reward_model.adapter",
        lambda run: run.rollout.reward_model.adapter is not None,
    ),
    "rollout.refill_below": ("rollout.refill_rounds", lambda run: run.rollout.refill_rounds > 0),
    "rollout.refill_rounds": ("rollout.refill_below", lambda run: run.rollout.refill_below > 0),
    **{
        f"rollout.curriculum.{key}": ("rollout.curriculum.by", lambda run: run.rollout.curriculum.by != "off")
        for key in ("window", "low", "high", "keep")
    },
    **{
        f"trainer.{key}": ("trainer.evaluate_problems", lambda run: run.trainer.evaluate_problems > 0)
        for key in ("evaluate_every", "evaluate_samples")
    },
    "trainer.publish_margin": ("trainer.publish_if=evaluation", lambda run: run.trainer.publish_if == "evaluation"),
    "trainer.evaluate_temperature": ("trainer.evaluate_samples", lambda run: run.trainer.evaluate_samples > 0),
    "trainer.evaluate_k": ("trainer.evaluate_samples", lambda run: run.trainer.evaluate_samples > 0),
}
"""Keys that have an effect only with another one: its name, and whether it is set."""


def keys_without_effect(run: RunParts) -> Iterator[str]:
    """Yield one line for each key that differs from its default and has no effect in this run."""
    kind, is_played = kind_of(run), plays_environment(run)
    for name, value in _changed({part: getattr(run, part) for part in ("learner", "rollout", "trainer")}):
        if any(_is_below(name, key) for key in UNUSED[kind]):
            yield f"{name}={value} has no effect with {CHOICES[kind]}"
        elif not is_played and any(_is_below(name, key) for key in ENVIRONMENT_KEYS):
            yield f"{name}={value} has no effect without trainer.evaluate_on=environment"
        elif name in SWITCHES and not SWITCHES[name][1](run):
            yield f"{name}={value} has no effect without {SWITCHES[name][0]}"


def keys_of_what_is_off(server: ServerSettings, registry: RegistrySettings, metrics: MetricsSettings) -> Iterator[str]:
    """Yield one line for each key that differs from its default, of a part of the process that is off."""
    off = {part: one for part, one in (("server", server), ("registry", registry)) if not one.enabled}
    for name, value in _changed(off):
        part, _, key = name.partition(".")
        if key != "enabled":
            yield f"{name}={value} has no effect without {part}.enabled=true"
    if metrics.project != MetricsSettings().project and not metrics.trackio and metrics.wandb == "off":
        yield f"metrics.project={metrics.project} has no effect without metrics.wandb or metrics.trackio"


def _changed(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys of these settings that differ from their defaults, with their values."""
    usual = flat_keys({part: asdict(type(settings)()) for part, settings in parts.items()})
    given = flat_keys({part: asdict(settings) for part, settings in parts.items()})
    yield from ((name, value) for name, value in given.items() if usual.get(name) != value)


def flat_keys(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return dotted keys with their values, as on the command line."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flat_keys(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return flat


def _is_below(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")


def recorded_keys(run: RunParts, dropout: float) -> dict[str, Any]:
    """Return the keys that training depends on, with values of JSON types.

    An environment's options are replaced by digests, since they may be secret. Programs that an Atropos run starts are
    left out.
    """
    parts = {part: getattr(run, part) for part in ("environment", "learner", "rollout", "trainer")}
    plain = json.loads(json.dumps({part: asdict(settings) for part, settings in parts.items()}))
    shown = {
        key: _digest(value) if any(name.endswith("options") for name in key.split(".")) else value
        for key, value in flat_keys(plain).items()
        if not _is_below(key, "rollout.atropos")
    }
    return {"model.lora.dropout": dropout, **shown}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
