"""How long a model stays in memory after a request, as bodies of all dialects say it: seconds, or a duration of Go."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import PlainValidator

UNITS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
"""Seconds of the units that durations of Go are written in."""
DURATION = re.compile(r"([+-]?)((?:\d+(?:\.\d*)?(?:ns|us|\u00b5s|ms|s|m|h))+)")


def read_keep_alive(value: object) -> float:
    """Return seconds of a number or of a duration such as 5m, 1h30m or -1; below 0 means for ever.

    Raises ValueError for anything else.
    """
    seconds = math.nan
    try:
        if (isinstance(value, int | float) and not isinstance(value, bool)) or (
            isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value)
        ):
            seconds = float(value)
        elif isinstance(value, str) and (match := DURATION.fullmatch(value)):
            parts = re.findall(r"([\d.]+)([a-z\u00b5]+)", match[2])
            seconds = (-1 if match[1] == "-" else 1) * sum(float(number) * UNITS[unit] for number, unit in parts)
    except OverflowError:  # an integer beyond all floats
        pass
    if not math.isfinite(seconds):
        raise ValueError("should be a number of seconds, or a duration such as 5m, 1h30m or -1")
    return seconds


KeepAlive = Annotated[float, PlainValidator(read_keep_alive, json_schema_input_type=float | str)]


def keep_alive_of(body: Mapping[str, Any]) -> float | None:
    """Return the seconds that a body asks for; None if it asks for none, or for what its route will refuse."""
    try:
        return None if body.get("keep_alive") is None else read_keep_alive(body["keep_alive"])
    except ValueError:
        return None
