"""Decoding of rows by the base and with LoRA on its experts, and an update of the same adapter, with random weights."""

import time
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from bench.workers.loads import SHAPES
from bench.workers.parallm_update import random_groups
from bench.workers.workbench import Workbench, open_workbench
from parallm.types import BASE, POLICY, GenerationRequest, SamplingParams


async def main(
    *,
    shape: str,
    rank: int,
    rows: int,
    prompt: int,
    new: int,
    groups: int,
    group_size: int,
    completion: int,
    decode_repeats: int = 3,
    update_repeats: int = 2,
) -> dict[str, Any]:
    """Tokens/s of the base and of the adapter, in turns, and seconds of each update after one that warms up."""
    began = time.perf_counter()
    async with open_workbench(shape=shape, rows=rows, targets=("all-linear", "experts"), rank=rank) as bench:
        built = time.perf_counter() - began
        speeds: dict[str, list[float]] = {BASE: [], POLICY: []}
        for turn in range(decode_repeats + 1):
            for model, found in speeds.items():
                speed = await _decode(bench, f"{model}-{turn}", model, rows, prompt, new, SHAPES[shape]["vocab_size"])
                found += [speed] if turn else []
        learner = await bench.make_learner(1e-5, advantage="reinforce_pp")
        trained = random_groups([(prompt, [completion] * group_size)] * groups, SHAPES[shape]["vocab_size"])
        seconds: list[float] = []
        for step in range(update_repeats + 1):
            start = time.perf_counter()
            await bench.update(learner, trained, step, completion)
            seconds.append(time.perf_counter() - start)
        return {
            "built": built,
            "base": median(speeds[BASE]),
            "lora": median(speeds[POLICY]),
            "speeds": speeds,
            "update_seconds": seconds[1:],
            "peak_gb": mx.get_peak_memory() / 1e9,
        }


async def _decode(bench: Workbench, name: str, model: str, rows: int, prompt: int, new: int, vocabulary: int) -> float:
    """Tokens/s between the first token of all rows and the last one: what prompts take is measured with one token."""
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(0, vocabulary, prompt).tolist()) for _ in range(rows)]
    seconds = []
    for max_tokens in (1, new):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=0, ignore_eos=True)
        requests = [
            GenerationRequest(
                request_id=f"{name}-{max_tokens}-{place}", prompt_tokens=tokens, sampling=sampling, model=model
            )
            for place, tokens in enumerate(prompts)
        ]
        began = time.perf_counter()
        await bench.engine.generate_all(requests)
        seconds.append(time.perf_counter() - began)
    return rows * (new - 1) / (seconds[1] - seconds[0])
