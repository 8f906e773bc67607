"""Times of our engine on a shape with random weights, part by part.

The engine is driven as the device thread drives it, without asyncio and HTTP. Every part has an engine of its own, and
prompts that none before had.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from bench.workers.loads import (
    SHAPES,
    Arrival,
    Load,
    check_tokens,
    lengths,
    random_arrivals,
    random_burst,
    random_prompts,
    random_storm,
    read_load,
)
from bench.workers.parts import run_parts
from bench.workers.random_model import random_base, random_model
from bench.workers.workbench import random_adapter
from parallm.device.blas import load_blas, set_blas_threads
from parallm.device.settings import DeviceSettings
from parallm.device.streams import DeviceStreams
from parallm.engine.engine import Engine
from parallm.engine.settings import EngineSettings, SpeculationSettings
from parallm.engine.speculation import Speculation
from parallm.model.adapters.table import AdapterTable
from parallm.model.kernels.cuda import on_cuda
from parallm.types import BASE, GenerationRequest, SamplingParams, TokenEvent, TrafficClass

VERSIONS = 8
LORA_ROWS, SAMPLING_ROWS, JOIN_ROWS = 32, 16, 16
GROUPS, GROUP_SIZE = 4, 8
CHURN_TOKENS = 4
WARM_UP_UNITS = 4
GREEDY = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)

Timing = tuple[float, float, float]
"""Seconds of some requests, of the median unit that gave a token to every row, and the CPU seconds that Python and MLX
took of that unit in this thread, which sleeps while it waits for a GPU."""


class Bench:
    def __init__(self, shape: str, load: Load) -> None:
        self._load = load
        self._shape = SHAPES[shape]
        mx.random.seed(0)
        self._model = random_model(self._shape)
        self._table = AdapterTable()
        self._streams = DeviceStreams(partial(set_blas_threads, load_blas(DeviceSettings())))
        self._num_runs = 0
        self._speculations: list[Speculation] = []
        """Those of the engines of the present part."""

    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            "b1": partial(self.same_lengths, 1),
            "b32": partial(self.same_lengths, 32),
            "b64": partial(self.same_lengths, 64),
            "b128": partial(self.same_lengths, 128),
            "lora": partial(self.lora, 1),
            "lora8": partial(self.lora, VERSIONS),
            "sampling16": partial(self.sampling, has_penalties=False),
            "penalties16": partial(self.sampling, has_penalties=True),
            "join": self.join,
            "group": self.group,
            "memory": self.memory,
            "prefill": self.prefill,
            "groups": self.groups,
            "mixed": partial(self.served, random_arrivals),
            "storm": partial(self.served, random_storm),
            "burst": partial(self.served, random_burst),
        }
        return {name: partial(self._watched, measure) for name, measure in measures.items()}

    def _watched(self, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Add the number of tokens that were guessed right, so that no forward was needed for them."""
        self._speculations.clear()
        return measure() | {"accepted": sum(one.num_accepted for one in self._speculations)}

    def same_lengths(self, rows: int) -> dict[str, Any]:
        """Rows of the base that begin and end together."""
        timed = self._in_turns([GREEDY] * rows, [BASE] * rows)
        size = sum(array.nbytes for _, array in tree_flatten(random_base(self._shape).parameters()))
        return {"tokens": rows * self._load.new, "weight_bytes": size} | _summary([timed() for _ in self._turns()])

    def lora(self, versions: int) -> dict[str, Any]:
        """Rows of some versions, in turns with rows of the base."""
        models = self._models(LORA_ROWS, versions)
        pair = self._in_turns([GREEDY] * LORA_ROWS, models), self._in_turns([GREEDY] * LORA_ROWS, [BASE] * LORA_ROWS)
        return self._compared(*pair)

    def sampling(self, *, has_penalties: bool) -> dict[str, Any]:
        """Rows that each sample in another way, in turns with greedy ones."""
        base = [BASE] * SAMPLING_ROWS
        settings = [_settings(place) for place in range(SAMPLING_ROWS)]
        if has_penalties:
            settings = [_with_penalties(one, place) for place, one in enumerate(settings)]
        return self._compared(self._in_turns(settings, base), self._in_turns([GREEDY] * SAMPLING_ROWS, base))

    def join(self) -> dict[str, Any]:
        """Units of a full engine, in turns without and with rows that leave and are replaced."""
        pairs = [(self._churn(0), self._churn(self._load.churn)) for _ in self._turns()][1:]
        return {
            "plain_seconds": [plain for (plain, _), _ in pairs],
            "churn_seconds": [churn for _, (churn, _) in pairs],
            "changes": [changes for _, (_, changes) in pairs],
        }

    def group(self) -> dict[str, Any]:
        """Prompt tokens that are computed for groups with shared prompts."""
        engine = self._engine(GROUPS * GROUP_SIZE)
        length = self._load.group_prompt
        self._timed(engine, self._requests([GREEDY] * GROUPS, [BASE] * GROUPS, length=length, n=GROUP_SIZE))
        computed = engine.prefill.num_prompt_tokens - engine.prefill.num_cached_tokens
        return {"computed": computed, "of_rows": GROUPS * GROUP_SIZE * length}

    def memory(self) -> dict[str, Any]:
        """Bytes that rows of all lengths hold while they decode, and those of the tokens that they have."""
        rows, vocabulary = self._load.memory_rows, self._shape["vocab_size"]
        engine = self._engine(rows)
        random = np.random.default_rng(0)
        prompts = [
            random.integers(0, vocabulary, count).tolist() for count in lengths(random, self._load.memory_lengths, rows)
        ]
        for request, prompt in zip(self._requests([GREEDY] * rows, [BASE] * rows), prompts, strict=True):
            engine.add(replace(request, prompt_tokens=tuple(prompt)), False)
        while engine.num_waiting():
            engine.step("rollout")
        for _ in range(WARM_UP_UNITS):
            engine.step("rollout")
        if engine.num_running() < rows:
            raise ValueError(f"{engine.num_running()} of {rows} rows decode")
        engine.flush("rollout")
        num_tokens = sum(map(len, prompts)) + engine.num_tokens()["rollout"] - rows  # the newest ones are not computed
        return {"held": engine.kv_budget.used, "needed": num_tokens * engine.kv_budget.cost.per_token}

    def prefill(self) -> dict[str, Any]:
        """Prompts of which one token each is sampled; tokens of prompts are counted."""
        length = self._load.group_prompt
        timed = self._in_turns([GREEDY] * LORA_ROWS, [BASE] * LORA_ROWS, length=length, new=1)
        return {"tokens": LORA_ROWS * length} | _summary([timed() for _ in self._turns()])

    def groups(self) -> dict[str, Any]:
        """Groups that share their prompts, from the first prompt token to the last sampled one."""
        timed = self._in_turns([GREEDY] * GROUPS, [BASE] * GROUPS, length=self._load.group_prompt, n=GROUP_SIZE)
        return {"tokens": GROUPS * GROUP_SIZE * self._load.new} | _summary([timed() for _ in self._turns()])

    def served(self, arrivals_of: Callable[[Load, int, int], list[Arrival]]) -> dict[str, Any]:
        """Requests of all lengths at the times of their arrivals; before them a quarter of others that warm up."""
        engine, vocabulary = self._engine(self._load.mixed_rows), self._shape["vocab_size"]
        while engine.prepare():  # as the device thread does while it waits for requests
            pass
        _serve(engine, arrivals_of(self._load, vocabulary, 1)[: max(1, self._load.requests // 4)])
        before = engine.num_tokens()["serving"]
        arrivals = arrivals_of(self._load, vocabulary, 0)
        began = time.perf_counter()
        _serve(engine, arrivals)
        seconds, tokens = time.perf_counter() - began, sum(one.num_new for one in arrivals)
        check_tokens(engine.num_tokens()["serving"] - before, tokens)
        return {"tokens": tokens, "seconds": [seconds]}

    def _turns(self) -> range:
        return range(self._load.repeats + 1)

    def _engine(self, rows: int, emit: Callable[[list[TokenEvent]], None] = lambda _: None) -> Engine:
        speculation = SpeculationSettings(method=self._load.speculation)  # type: ignore[arg-type]  # pydantic checks it
        engine = Engine(
            self._model,
            self._table,
            self._streams,
            EngineSettings(max_rows=rows, speculation=speculation),
            emit=emit,
            report=lambda names, error: print("failed", names, repr(error), file=sys.stderr),
            async_scheduling=on_cuda(),
        )
        self._speculations.append(engine.speculation)
        return engine

    def _models(self, rows: int, versions: int) -> list[str]:
        """The versions in turns, or the base where there are none."""
        if versions and not self._table.cards():
            for version in range(1, VERSIONS + 1):
                self._table.publish(random_adapter(self._model, version, seed=version))
        return [f"policy@{1 + place % versions}" if versions else BASE for place in range(rows)]

    def _requests(
        self, settings: Sequence[SamplingParams], models: Sequence[str], *, length: int = 0, new: int = 0, n: int = 1
    ) -> list[GenerationRequest]:
        """One request for each; prompts of `length` and `new` tokens, by default those of the load."""
        self._num_runs += 1
        prompts = random_prompts(
            self._shape["vocab_size"], len(settings), length or self._load.prompt, seed=1000 + self._num_runs
        )
        return [
            GenerationRequest(
                request_id=f"{self._num_runs}-{place}",
                prompt_tokens=prompt,
                sampling=replace(one, max_tokens=new or self._load.new),
                model=model,
                n=n,
                traffic="rollout",
            )
            for place, (prompt, one, model) in enumerate(zip(prompts, settings, models, strict=True))
        ]

    def _timed(self, engine: Engine, requests: Sequence[GenerationRequest]) -> Timing:
        rows = sum(request.n for request in requests)
        first = engine.num_tokens()["rollout"]
        steps: list[float] = []
        host_steps: list[float] = []
        began = time.perf_counter()
        for request in requests:
            engine.add(request, False)
        while engine.has_work("rollout"):
            before, start, host = engine.num_tokens()["rollout"], time.perf_counter(), time.thread_time()
            engine.step("rollout")
            if engine.num_tokens()["rollout"] - before == rows:
                steps.append(time.perf_counter() - start)
                host_steps.append(time.thread_time() - host)
        seconds = time.perf_counter() - began
        check_tokens(engine.num_tokens()["rollout"] - first, sum(one.n * one.sampling.max_tokens for one in requests))
        return seconds, median(steps or [0.0]), median(host_steps or [0.0])

    def _in_turns(
        self, settings: Sequence[SamplingParams], models: Sequence[str], **sizes: int
    ) -> Callable[[], Timing]:
        engine = self._engine(len(settings) * sizes.get("n", 1))
        return lambda: self._timed(engine, self._requests(settings, models, **sizes))

    def _compared(self, ours: Callable[[], Timing], plain: Callable[[], Timing]) -> dict[str, Any]:
        pairs = [(ours(), plain()) for _ in self._turns()]
        return {**_summary([one for one, _ in pairs]), "plain": _summary([other for _, other in pairs])}

    def _churn(self, members: int) -> tuple[float, float]:
        """Mean seconds of a decode unit of JOIN_ROWS rows, and how many rows join or leave in it, on average.

        Two rows come and go, each for another of `members` when it has ended. They take turns, so that whenever one
        leaves, the last row has to move into its slot.
        """
        units = (self._load.churn - 2) * CHURN_TOKENS // 2
        ended: list[str] = []
        engine = self._engine(JOIN_ROWS, lambda events: ended.extend(one.request_id for one in events))
        new = 2 * units + 2 * WARM_UP_UNITS
        stay, first, others = self._requests([GREEDY] * 3, [BASE] * 3, length=self._load.cached, new=new)
        requests = [replace(stay, n=JOIN_ROWS)]
        if members:
            first = replace(first, sampling=replace(GREEDY, max_tokens=CHURN_TOKENS // 2))
            others = replace(others, n=members, sampling=replace(GREEDY, max_tokens=CHURN_TOKENS))
            requests = [replace(stay, n=JOIN_ROWS - 2), first, others]
        for request in requests:
            engine.add(request, False)
        while engine.num_tokens()["rollout"] < JOIN_ROWS:
            engine.step("rollout")
        for _ in range(WARM_UP_UNITS):
            engine.step("rollout")
        num_ended, began = len(ended), time.perf_counter()
        for _ in range(units):
            engine.step("rollout")
        return (time.perf_counter() - began) / units, 2 * (len(ended) - num_ended) / units


def _settings(place: int) -> SamplingParams:
    """The place's own settings: no two of 16 are the same."""
    return replace(
        GREEDY,
        temperature=0.5 + place / 16,
        top_k=(0, 5 + place, 50 + place, 0)[place % 4],
        top_p=(0.8 + place / 100, 1.0, 0.9 + place / 200)[place % 3],
        min_p=(0.0, 0.01 + place / 1000)[place % 2],
        seed=place,
    )


def _with_penalties(settings: SamplingParams, place: int) -> SamplingParams:
    return replace(
        settings,
        presence_penalty=(0.0, 0.1 + place / 100)[place % 2],
        frequency_penalty=(0.0, 0.2, 0.2 + place / 100)[place % 3],
        repetition_penalty=(1.0, 1.1, 1.0, 1.0 + place / 100)[place % 4],
        logit_bias=((place, 1.0), (place + 1, -1.0)) if place % 4 == 0 else (),
    )


def _serve(engine: Engine, arrivals: Sequence[Arrival]) -> None:
    traffic: TrafficClass = "serving"
    coming = deque(enumerate(arrivals))
    began = time.perf_counter()
    while coming or engine.has_work(traffic):
        while coming and coming[0][1].seconds <= time.perf_counter() - began:
            place, one = coming.popleft()
            sampling = replace(GREEDY, max_tokens=one.num_new)
            engine.add(
                GenerationRequest(request_id=str(place), prompt_tokens=one.prompt, sampling=sampling, model=BASE), False
            )
        if engine.has_work(traffic):
            engine.step(traffic)
        elif coming:
            time.sleep(max(0.0, coming[0][1].seconds - (time.perf_counter() - began)))


def _summary(timings: Sequence[Timing]) -> dict[str, Any]:
    """The first one warms up."""
    return dict(zip(("seconds", "step_seconds", "host_seconds"), zip(*timings[1:], strict=True), strict=True))


def main(*, shape: str, parts: Sequence[str], load: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return run_parts(parts, Bench(shape, read_load(load)).parts())
