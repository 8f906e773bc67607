"""How a worker of several parts runs them: one that fails costs its own figures only."""

import gc
import json
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mlx.core as mx

Part = Callable[[], Mapping[str, Any]]


def run_parts(wanted: Iterable[str], parts: Mapping[str, Part]) -> None:
    """Print one line of JSON for each part as soon as it has ended: what it found, or its error."""
    for name in wanted:
        try:
            found: Mapping[str, Any] = parts[name]()
        except Exception as error:  # noqa: BLE001  # whatever it was, the other parts are measured
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"part": name, **found}), flush=True)
        gc.collect()
        mx.clear_cache()
