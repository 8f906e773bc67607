"""Finds the settings with which a peer is fastest: one setting after the other, beside the best of the others."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    settings: Settings
    seconds: float | None
    """None: it does not run with these settings."""


def tune(
    start: Settings, choices: Mapping[str, Sequence[Any]], seconds_of: Callable[[Settings], float | None]
) -> list[Trial]:
    """Try `start`, then each value of each setting in turn beside the best of the others.

    Returns the trials, fastest first; those that do not run come last. `seconds_of` is called once for each. Each is
    shown on stderr as it ends.
    """
    trials = [tried(start, seconds_of)]
    for name, values in choices.items():
        best = ranked(trials)[0].settings
        for value in values:
            settings = {**best, name: value}
            if all(trial.settings != settings for trial in trials):
                trials.append(tried(settings, seconds_of))
    return ranked(trials)


def tried(settings: Settings, seconds_of: Callable[[Settings], float | None]) -> Trial:
    seconds = seconds_of(settings)
    result = "does not run" if seconds is None else f"{seconds:.4g} s"
    print(f"  {described(settings)}: {result}", file=sys.stderr, flush=True)
    return Trial(settings=settings, seconds=seconds)


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    return sorted(trials, key=lambda trial: (trial.seconds is None, trial.seconds or 0.0))


def described(settings: Settings) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "no settings"
