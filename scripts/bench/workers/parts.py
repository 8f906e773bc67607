"""Parts of a worker: one that fails costs its own figures only."""

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import mlx.core as mx

Part = Callable[[], Mapping[str, Any]]


def run_parts(names: Iterable[str], parts: Mapping[str, Part]) -> Iterator[dict[str, Any]]:
    """The result of each part as soon as it has ended, or its error."""
    for name in names:
        try:
            result: Mapping[str, Any] = parts[name]()
        except Exception as error:  # noqa: BLE001  # whatever it was, the other parts are measured
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        yield {"part": name, **result}
        gc.collect()
        mx.clear_cache()
