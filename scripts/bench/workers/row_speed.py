"""Tokens/s of rounds of as many rows at once, by turns of each number of rows."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from bench.workers.workbench import open_workbench
from parallm.engine.captured_forward import CapturedForward
from parallm.types import POLICY, SamplingParams


async def main(*, shape: str, rows: Sequence[int], new: int, rounds: int, most_captured: int) -> AsyncIterator[Any]:
    """Yield the rows and the tokens/s of a round, for each number of rows in turn, after a round that does not count.
    Steps of more than `most_captured` rows are launched kernel by kernel."""
    call = CapturedForward.__call__

    def some(self: CapturedForward, tokens_B: Any, *more: Any) -> Any:
        return call(self, tokens_B, *more) if len(tokens_B) <= most_captured else None

    is_limited = most_captured < max(rows)
    async with open_workbench(shape=shape, rows=max(rows)) as bench:
        with patch.object(CapturedForward, "__call__", some) if is_limited else nullcontext():
            for number in range(1 + rounds):
                for count in rows:
                    sampling = SamplingParams(max_tokens=new, seed=number, ignore_eos=True)
                    requests = bench.requests(f"{count}-{number}", None, count // 8, sampling, model=POLICY)
                    began = time.perf_counter()
                    await bench.engine.generate_all(requests)
                    if number > 0:
                        yield {"rows": count, "speed": count * new / (time.perf_counter() - began)}
