"""Python builds what comes next while MLX hands over what is built.

`mx.async_eval` returns when the device is about to run out of work: it never has more than ten launches waiting. What
is built only then leaves the device idle, 10 to 25 ms for a pass of an 8B model (one H200, 2026-11-21: 5% of an
update).
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import mlx.core as mx

Built = TypeVar("Built")


class Builder:
    """A thread that builds graphs for the device thread and evaluates nothing. They are built for `stream`."""

    def __init__(self, stream: mx.Stream) -> None:
        # MLX gives each thread streams of its own, which only that thread may evaluate
        self._pool = ThreadPoolExecutor(1, "builder", initializer=mx.set_default_stream, initargs=(stream,))

    def meanwhile(self, build: Callable[[], Built], hand_over: Callable[[], object]) -> Built:
        """What `build` returns, which runs at the same time as `hand_over`. Returns when both have ended."""
        built = self._pool.submit(build)
        try:
            hand_over()
        finally:
            wait([built])
        return built.result()
