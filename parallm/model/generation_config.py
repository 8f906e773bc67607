"""Sampling defaults that a model brings along, in its generation_config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallm.errors import ConfigError

FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""Fields of the file that count, as in vLLM."""


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the file's fields about sampling, unchecked; none where there is no file. Raises ConfigError.

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
