"""Functions of the user's that reward what clients have asked for by a name: `package.module:function`."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from parallm.environment.custom import import_module
from parallm.errors import ConfigError
from parallm.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What a scoring function gets."""

    prompt: str
    """As the model read it, special tokens included."""
    text: str
    finish_reason: FinishReason
    metadata: Mapping[str, Any] = field(repr=False)
    """What the client has sent with its request."""


Rewards: TypeAlias = float | Mapping[str, float]
"""A number, or parts by name."""
ScoringFunction: TypeAlias = Callable[[Answered], Rewards | Awaitable[Rewards | None] | None]
"""None leaves the reward to the client."""


def load_scoring_functions(targets: Mapping[str, str]) -> dict[str, ScoringFunction]:
    """Import them all. Raises ConfigError for one that is not there."""
    return {
        name: _load(f"rollout.live.scoring_functions.{name}={target!r}", target) for name, target in targets.items()
    }


def _load(setting: str, target: str) -> ScoringFunction:
    module_name, colon, function_name = target.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f"{setting} must have the form package.module:function")
    function: ScoringFunction | None = getattr(import_module(module_name, setting), function_name, None)
    if not callable(function):
        raise ConfigError(f"{setting}: {module_name} has no function {function_name}")
    return function
