"""Sampling defaults of clients' requests, from `server.generation_config` and the model's generation_config.json."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def sampling_defaults(settings: ServerSettings, model: Path) -> SamplingDefaults:
    """Return the defaults of `server.generation_config`; values of `server.override_generation_config` win.

    `model` is the model's folder. Raises ConfigError for a missing folder and for values that no request may have.
    """
    choice = settings.generation_config
    given = {} if choice == NEUTRAL else _checked(_folder(choice, model))
    own = dataclasses.asdict(settings.override_generation_config)
    defaults = SamplingDefaults(**{**given, **{name: value for name, value in own.items() if value is not None}})
    if defaults.temperature is not None and 0 < defaults.temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"server.generation_config: temperature is {defaults.temperature:g}; set 0 for greedy or at least "
            f"{MIN_TEMPERATURE:g}, with server.override_generation_config.temperature"
        )
    if values := set_values(defaults):
        shown = ", ".join(f"{name}={value:g}" for name, value in values.items())
        logger.info("sampling defaults of requests: %s", shown)
    return defaults


def set_values(defaults: SamplingDefaults) -> dict[str, float]:
    """Return the defaults that are not null."""
    return {name: value for name, value in dataclasses.asdict(defaults).items() if value is not None}


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the file's sampling fields, unchecked; none without a file. Raises ConfigError.

    `do_sample: false` is a temperature of 0.
    """
    file = folder / FILE
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"server.generation_config: {file} cannot be read: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"server.generation_config: {file} is no JSON object")
    sampling = {name: values[name] for name in NAMES if values.get(name) is not None}
    return sampling | ({"temperature": 0.0} if values.get("do_sample") is False else {})


def _folder(choice: str, model: Path) -> Path:
    folder = model if choice == AUTO else Path(choice).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"server.generation_config={choice} is no folder; name one with generation_config.json, or choose {AUTO} "
            f"(the model's) or {NEUTRAL} (none)"
        )
    return folder


def _checked(folder: Path) -> Mapping[str, Any]:
    values = read_generation_config(folder)
    try:
        TypeAdapter(SamplingDefaults).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"server.generation_config: {folder} says {first['loc'][-1]}={first['input']!r}: {first['msg']}; set it "
            "with server.override_generation_config and server.generation_config=parallm"
        ) from error
    return values
