"""Speed of the engine with n-gram speculation and without, in turns in one process, on the same tokens.

On a GPU the products of more rows round otherwise, so completions may part there.
"""

import time
from functools import partial
from operator import eq

import bench
from bench.problems import load_problems
from parallm.device.blas import set_blas_threads
from parallm.device.streams import DeviceStreams
from parallm.engine.engine import Engine
from parallm.engine.settings import EngineSettings, SpeculationSettings
from parallm.model.adapters.table import AdapterTable
from parallm.model.kernels.cuda import on_cuda
from parallm.model.load import load_shared_model
from parallm.model.settings import ModelSettings
from parallm.types import BASE, GenerationRequest, SamplingParams, TokenEvent

Tokens = tuple[int, ...]


def main(
    *, model: str, data: str | None, prompts: int, max_tokens: int, rows: int, rounds: int
) -> dict[str, list[dict[str, float]]]:
    """By `greedy/ngram` and the like: the speeds of each round."""
    shared = load_shared_model(ModelSettings(path=model))
    streams = DeviceStreams(partial(set_blas_threads, bench.BLAS))
    questions = [shared.tokenizer.encode_chat(one.messages) for one in load_problems(data, prompts)]

    def run(way: str, temperature: float) -> tuple[list[Tokens], dict[str, float]]:
        """All completions, and their speeds."""
        events: list[TokenEvent] = []
        speculation = SpeculationSettings(method=way)  # type: ignore[arg-type]  # pydantic checks it
        settings = EngineSettings(max_rows=rows, prefix_cache=False, speculation=speculation)
        engine = Engine(shared, AdapterTable(), streams, settings, emit=events.extend, report=stop)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
        for place, prompt in enumerate(questions):
            request = GenerationRequest(request_id=str(place), prompt_tokens=prompt, sampling=sampling, model=BASE)
            engine.add(request, False)
        began, began_cpu = time.perf_counter(), time.process_time()
        while engine.has_work("serving"):
            engine.step("serving")
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
        tokens = {event.request_id: event.completion.tokens for event in events if event.completion}
        num_tokens = sum(map(len, tokens.values()))
        return [tokens[str(place)] for place in range(len(questions))], {
            "tokens_per_second": num_tokens / seconds,
            "tokens_per_cpu_second": num_tokens / cpu_seconds,
            "accepted": engine.speculation.num_accepted / num_tokens,
        }

    results: dict[str, list[dict[str, float]]] = {}
    for task, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        expected, _ = run("none", temperature)
        for _ in range(rounds):
            for way in ("none", "ngram"):
                tokens, speeds = run(way, temperature)
                speeds["same"] = sum(map(eq, tokens, expected)) / len(expected)
                assert speeds["same"] == 1 or on_cuda(), f"{way} samples other tokens than none"
                results.setdefault(f"{task}/{way}", []).append(speeds)
    return results


def stop(_: object, error: Exception) -> None:
    raise error
