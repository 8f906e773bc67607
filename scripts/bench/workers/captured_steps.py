"""Rounds whose steps are replayed as CUDA graphs, and rounds whose kernels MLX hands over one by one, in turns."""

import time
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

from bench.workers.workbench import open_workbench
from parallm.engine.captured_forward import CapturedForward
from parallm.types import POLICY, SamplingParams


async def main(*, shape: str, rows: int, new: int, rounds: int) -> AsyncIterator[dict[str, Any]]:
    """Yield the seconds of a round each way, after one that does not count. Raises ValueError if both ways sample other
    tokens; a single row may, because MLX computes it alone, by another kernel, and a graph fills it up."""
    async with open_workbench(shape=shape, rows=rows) as bench:
        captured = getattr(bench.core.memory, "_captured", None)
        min_rows = captured.min_rows if captured else 1
        for number in range(1 + rounds):
            seconds, tokens = {}, []
            for way in ("launched", "replayed"):
                sampling = SamplingParams(max_tokens=new, seed=number, ignore_eos=True)
                requests = bench.requests(
                    f"{way}-{number}", None, -(-rows // 8), sampling, n=min(8, rows), model=POLICY
                )
                with patch.object(
                    CapturedForward, "__call__", give_up if way == "launched" else CapturedForward.__call__
                ):
                    if captured:
                        captured.min_rows = 1 if way == "launched" else min_rows
                    began = time.perf_counter()
                    results = await bench.engine.generate_all(requests)
                    seconds[way] = time.perf_counter() - began
                tokens.append([completion.tokens for completions in results for completion in completions])
            if rows > 1 and tokens[0] != tokens[1]:
                raise ValueError(f"round {number}: graphs sample other tokens than launches")
            if number > 0:
                yield seconds


def give_up(*_: object) -> None:
    """No step is captured."""
