"""Tokens/s of our engine: all prompts submitted at once, `group_size` completions each; and the size of the base."""

import time

from bench.workers.workbench import open_workbench
from parallm.types import BASE, POLICY, SamplingParams


async def main(
    *,
    model: str,
    data: str | None,
    prompts: int,
    max_tokens: int,
    rows: int,
    group_size: int = 8,
    seed: int = 0,
    lora: bool = False,
    quantized: str = "auto",
    ignore_eos: bool = False,
) -> dict[str, float]:
    served = POLICY if lora else BASE
    async with open_workbench(model=model, quantized=quantized, rows=rows) as bench:
        warm_up = SamplingParams(max_tokens=8)
        await bench.engine.generate_all(bench.requests("warm-up", data, 2, warm_up, n=group_size, model=served))
        sampling = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)
        requests = bench.requests("speed", data, prompts, sampling, n=group_size, model=served)
        began = time.perf_counter()
        results = await bench.engine.generate_all(requests)
        seconds = time.perf_counter() - began
        tokens = sum(len(completion.tokens) for completions in results for completion in completions)
        return {"speed": tokens / seconds, "base_bytes": bench.model.base_bytes}
