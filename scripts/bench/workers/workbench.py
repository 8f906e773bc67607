"""Engine and learner in one process, as the product wires them, for workers that measure."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx

import bench
from bench.problems import load_problems
from bench.workers.loads import SHAPES
from bench.workers.random_model import random_model
from parallm.device.blas import set_blas_threads
from parallm.device.governor import Governor
from parallm.device.streams import DeviceStreams
from parallm.device.thread import DeviceThread
from parallm.engine.async_engine import AsyncEngine
from parallm.engine.engine import Engine
from parallm.engine.settings import EngineSettings
from parallm.learner.learner import Learner
from parallm.learner.settings import LearnerSettings
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.initial import initial_arrays
from parallm.model.adapters.table import AdapterTable
from parallm.model.kernels.cuda import on_cuda
from parallm.model.load import load_shared_model
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.reports import UpdateReport
from parallm.rollout.episode import Episode, trajectory_of
from parallm.run.runtime import frozen_heap
from parallm.types import BASE, Completion, GenerationRequest, Problem, SamplingParams, TrajectoryGroup

Result = TypeVar("Result")
RANK, ALPHA = 16, 32.0
SIZE_OF_B = 0.01
"""Standard deviation of LoRA's B: large enough to change what is sampled, small enough to leave sense in it."""


class Workbench:
    """The parts of one process, made by `open_workbench`."""

    def __init__(
        self,
        device: DeviceThread,
        engine: AsyncEngine,
        settings: EngineSettings,
        load: Callable[[], SharedModel],
        rank: int,
    ) -> None:
        """Called on the device thread."""
        self.device = device
        self.engine = engine
        self.model = load()
        self.table = AdapterTable()
        self.streams = DeviceStreams(partial(set_blas_threads, bench.BLAS))
        self.adapter = random_adapter(self.model, 1, rank=rank)
        self.table.publish(self.adapter)
        parts = self.model, self.table, self.streams, settings
        self.core = Engine(*parts, emit=engine.emit, report=engine.report, async_scheduling=on_cuda())

    async def on_device(self, function: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self.device.call(function))

    async def make_learner(self, learning_rate: float, seed: int = 0, **more: Any) -> Learner:
        settings = LearnerSettings(learning_rate=learning_rate, **more)
        return await self.on_device(
            lambda: Learner(
                self.model,
                self.streams,
                settings,
                start=self.adapter,
                total_steps=100,
                seed=seed,
                is_waited_for=lambda: self.device.is_serving,
            )
        )

    async def update(
        self, learner: Learner, groups: Sequence[TrajectoryGroup], step: int, max_tokens: int
    ) -> UpdateReport:
        units = learner.update(groups, step=step, max_tokens=max_tokens)
        report = await asyncio.wrap_future(self.device.iterate(units))
        assert report is not None, "an update ends with its report"
        assert report.skipped is None, report.skipped
        return report

    def requests(
        self, name: str, data: str | None, prompts: int, sampling: SamplingParams, *, n: int = 8, model: str = BASE
    ) -> list[GenerationRequest]:
        """One request a problem, with `n` completions each: single turns, as rollouts ask for them."""
        return [
            GenerationRequest(
                request_id=f"{name}-{place}",
                prompt_tokens=self.model.tokenizer.encode_chat(problem.messages),
                sampling=sampling,
                n=n,
                model=model,
                traffic="rollout",
                is_continued=False,
            )
            for place, problem in enumerate(load_problems(data, prompts))
        ]

    async def sampled_groups(self, requests: Sequence[GenerationRequest], seed: int = 0) -> list[TrajectoryGroup]:
        results = await self.engine.generate_all(requests)
        generator = random.Random(seed)
        return [scored_at_random(*pair, generator) for pair in zip(requests, results, strict=True)]


@asynccontextmanager
async def open_workbench(
    *,
    model: str | SharedModel = "nano",
    shape: str | None = None,
    dtype: str = "auto",
    quantized: str = "auto",
    tokenizer: str | None = None,
    rows: int = 128,
    targets: tuple[str, ...] | None = None,
    rank: int = RANK,
    **engine_settings: Any,
) -> AsyncIterator[Workbench]:
    """A model, by its folder or loaded already, or random weights of a shape, whose tokenizer may have a folder;
    `targets` and `rank` are the form of its adapter, `engine_settings` are more of the engine's."""
    device = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))

    def load() -> SharedModel:
        if shape is not None:
            return random_model(SHAPES[shape], dtype, tokenizer, targets)
        if isinstance(model, SharedModel):
            return model
        return load_shared_model(
            ModelSettings(path=model, dtype=dtype, quantized=quantized)  # type: ignore[arg-type]  # it checks
        )

    engine = AsyncEngine(device, asyncio.get_running_loop())
    settings = EngineSettings(max_rows=rows, **engine_settings)
    try:
        made = await asyncio.wrap_future(device.call(lambda: Workbench(device, engine, settings, load, rank)))
        engine.attach(made.core)
        with frozen_heap():
            yield made
    finally:
        device.stop()


def random_adapter(
    model: SharedModel, version: int, seed: int = 0, size: float = SIZE_OF_B, rank: int = RANK
) -> Adapter:
    """An adapter on all linear layers whose product is not zero."""
    arrays = initial_arrays(model.targets, rank, mx.random.key(seed))
    keys = mx.random.split(mx.random.key(seed + 1), len(arrays))
    filled = {
        name: size * mx.random.normal(array.shape, key=key) if name.endswith(".lora_b") else array
        for key, (name, array) in zip(keys, arrays.items(), strict=True)
    }
    return make_adapter(filled, version=version, rank=rank, alpha=ALPHA * rank / RANK)


def scored_at_random(
    request: GenerationRequest, completions: Sequence[Completion], generator: random.Random
) -> TrajectoryGroup:
    """A group with signal: half of its completions, chosen at random, get reward 1."""
    winners = set(generator.sample(range(len(completions)), len(completions) // 2))
    problem = Problem(problem_id=request.request_id, messages=(), answer="")
    trajectories = []
    for place, completion in enumerate(completions):
        episode = Episode(problem=problem, request=request, index=place)
        episode.append_completion(completion, completion.text)
        mask, reward = tuple(episode.is_sampled), float(place in winners)
        trajectories.append(trajectory_of(episode, reward=reward, parts={}, loss_mask=mask))
    return TrajectoryGroup(problem=problem, trajectories=tuple(trajectories))
