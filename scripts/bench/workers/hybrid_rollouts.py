"""Rollouts of a hybrid with random weights: rows that share steps, the same rows one by one, and BatchGenerator.

All sides have one model and take turns. `ragged`: prompts and completions of all lengths; `equal`: of one length, which
is what BatchGenerator computes right. Greedy, so that no side draws more numbers than another. What this imports of
ParaLLM is also there in the older commit that the measurement runs with it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

import parallm
from bench.workers.loads import SHAPES, Tokens, random_prompts
from bench.workers.random_model import random_model
from parallm.device.blas import load_blas, set_blas_threads
from parallm.device.settings import DeviceSettings
from parallm.device.streams import DeviceStreams
from parallm.engine.engine import Engine
from parallm.engine.settings import EngineSettings
from parallm.model.adapters.table import AdapterTable
from parallm.model.kernels.cuda import on_cuda
from parallm.model.shared_model import SharedModel
from parallm.types import BASE, GenerationRequest, SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
Run = Callable[[], int]
"""Computes all tokens; returns their number."""
Load = Sequence[tuple[Tokens, int]]
"""Prompts, and the tokens to sample of each."""


def main(
    *, shape: str, rows: int, prompt: int, new: int, rounds: int, sides: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the seconds and CPU seconds of each of `sides`, or all, a round at a time, after one that warms up."""
    mx.random.seed(0)
    model = random_model(SHAPES[shape])
    vocabulary = SHAPES[shape]["vocab_size"]
    runs: dict[str, Callable[[int], Run]] = {
        "ragged.rows": lambda seed: ours(model, ragged(vocabulary, rows, prompt, new, seed)),
        "ragged.by_row": lambda seed: by_row(model, ragged(vocabulary, rows, prompt, new, seed)),
        "equal.rows": lambda seed: ours(model, equal(vocabulary, rows, prompt, new, seed)),
        "equal.batch_generator": lambda seed: theirs(model, equal(vocabulary, rows, prompt, new, seed)),
    }
    for number in range(rounds + 1):
        for name in runs if sides is None else sides:
            run = runs[name](number)
            began, cpu = time.perf_counter(), time.process_time()
            num_tokens = run()
            seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
            if number:
                times = {"seconds": seconds, "cpu_seconds": cpu_seconds}
                yield {"side": name, "tokens": num_tokens, **times, "package": str(Path(parallm.__file__).parent)}


def equal(vocabulary: int, rows: int, prompt: int, new: int, seed: int) -> Load:
    return [(tokens, new) for tokens in random_prompts(vocabulary, rows, prompt, seed)]


def ragged(vocabulary: int, rows: int, prompt: int, new: int, seed: int) -> Load:
    """Prompts and completions between a quarter of the lengths and the whole of them."""
    random = np.random.default_rng(seed)
    lengths = random.integers(prompt // 4, prompt + 1, rows).tolist()
    news = random.integers(new // 4, new + 1, rows).tolist()
    return [
        (tokens[:length], count)
        for tokens, length, count in zip(random_prompts(vocabulary, rows, prompt, seed), lengths, news, strict=True)
    ]


def ours(model: SharedModel, load: Load) -> Run:
    streams = DeviceStreams(partial(set_blas_threads, load_blas(DeviceSettings())))
    settings = EngineSettings(max_rows=len(load), prefix_cache=False)
    engine = Engine(
        model,
        AdapterTable(),
        streams,
        settings,
        emit=lambda _: None,
        report=lambda _, error: raised(error),
        async_scheduling=on_cuda(),
    )
    for place, (tokens, count) in enumerate(load):
        sampling = replace(GREEDY, max_tokens=count)
        request = GenerationRequest(
            request_id=f"r{place}", prompt_tokens=tokens, sampling=sampling, n=1, model=BASE, traffic="rollout"
        )
        engine.add(request, False)

    def run() -> int:
        while engine.has_work("rollout"):
            engine.step("rollout")
        assert engine.num_tokens()["rollout"] == sum(count for _, count in load), "a token is missing"
        return engine.num_tokens()["rollout"]

    return run


def raised(error: Exception) -> None:
    raise error


def by_row(model: SharedModel, load: Load) -> Run:
    """As rows are computed whose caches cannot be shared: prompts one by one, too."""
    with patch("parallm.engine.decode_batch.shares_steps", lambda _: False):
        return ours(model, load)


def theirs(model: SharedModel, load: Load) -> Run:
    tokens, counts = [list(prompt) for prompt, _ in load], [count for _, count in load]
    generator = BatchGenerator(
        model.base, stop_tokens=[], completion_batch_size=len(load), prefill_batch_size=min(8, len(load))
    )
    generator.insert(tokens, counts, caches=[make_prompt_cache(model.base) for _ in load])

    def run() -> int:
        num_tokens = 0
        while responses := generator.next_generated():
            num_tokens += len(responses)
        generator.close()
        return num_tokens

    return run
