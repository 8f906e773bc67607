"""Sampling defaults of clients' requests, from `server.generation_config` and the model's generation_config.json."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from parallm.errors import ConfigError
from parallm.server.openai.translate import MIN_TEMPERATURE
from parallm.server.settings import SamplingDefaults, ServerSettings

AUTO = "auto"
NEUTRAL = "parallm"
FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""Fields of the file that are used, as in vLLM."""

logger = logging.getLogger(__name__)


def sampling_defaults(settings: ServerSettings, model: Path) -> dict[str, float]:
    """Return the defaults of `server.generation_config`; values of `server.override_generation_config` win.

    `model` is the model's folder. Raises ConfigError for a missing folder and for values that no request may have.
    """
    choice, defaults = settings.generation_config, SamplingDefaults()
    if choice != NEUTRAL:
        folder = model if choice == AUTO else Path(choice).expanduser()
        if not folder.is_dir():
            raise ConfigError(
                f"server.generation_config={choice} is no folder; name one with generation_config.json, or choose "
                f"{AUTO} (the model's) or {NEUTRAL} (none)"
            )
        defaults = _read(folder)
    values = _set_values(defaults) | _set_values(settings.override_generation_config)
    if 0 < values.get("temperature", 0) < MIN_TEMPERATURE:
        raise ConfigError(
            f"server.generation_config: temperature is {values['temperature']:g}; set 0 for greedy or at least "
            f"{MIN_TEMPERATURE:g}, with server.override_generation_config.temperature"
        )
    if values:
        shown = ", ".join(f"{name}={value:g}" for name, value in values.items())
        logger.info("sampling defaults of requests: %s", shown)
    return values


def _set_values(defaults: SamplingDefaults) -> dict[str, float]:
    return {name: value for name, value in dataclasses.asdict(defaults).items() if value is not None}


def _read(folder: Path) -> SamplingDefaults:
    """Read the file's sampling fields; none without a file. `do_sample: false` is a temperature of 0."""
    file = folder / FILE
    if not file.is_file():
        return SamplingDefaults()
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"server.generation_config: {file} cannot be read: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"server.generation_config: {file} is no JSON object")
    greedy = {"temperature": 0.0} if values.get("do_sample") is False else {}
    try:
        return TypeAdapter(SamplingDefaults).validate_python({name: values.get(name) for name in NAMES} | greedy)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"server.generation_config: {folder} says {first['loc'][-1]}={first['input']!r}: {first['msg']}; set it "
            "with server.override_generation_config and server.generation_config=parallm"
        ) from error
