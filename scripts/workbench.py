"""Engine and learner in one process, as the product wires them, for workers that measure. Import it after the BLAS."""

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import mlx.core as mx
from job import Job
from problems import load_problems
from random_model import random_model
from shapes import SHAPES

from parallm.device.blas import load_blas, set_blas_threads
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
from parallm.types import BASE, POLICY, Completion, GenerationRequest, Problem, SamplingParams, TrajectoryGroup

Result = TypeVar("Result")
RANK, ALPHA = 16, 32.0
SIZE_OF_B = 0.01
"""Standard deviation of LoRA's B: large enough to change what is sampled, small enough to leave sense in it."""


class Workbench:
    """The parts of one process. Make it with `open_workbench`; call `close` at the end."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.blas = load_blas(job.device)
        self.device = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
        self.engine = AsyncEngine(self.device, asyncio.get_running_loop())
        self.table = AdapterTable()

    async def build(self) -> "Workbench":
        self.model: SharedModel = await self.on_device(self._load)
        self.streams = await self.on_device(lambda: DeviceStreams(partial(set_blas_threads, self.blas)))
        self.adapter: Adapter = await self.on_device(partial(random_adapter, self.model, 1))
        await self.on_device(partial(self.table.publish, self.adapter))
        settings = EngineSettings(
            max_rows=self.job.rows,
            kv_cache_bytes=self.job.kv_cache_bytes,
            kv_bits=self.job.kv_bits,  # type: ignore[arg-type]  # pydantic checks it
        )
        core = await self.on_device(
            partial(
                Engine,
                self.model,
                self.table,
                self.streams,
                settings,
                emit=self.engine.emit,
                report=self.engine.report,
                async_scheduling=on_cuda(),
            )
        )
        self.engine.attach(core)
        return self

    def _load(self) -> SharedModel:
        if self.job.shape is not None:
            return random_model(SHAPES[self.job.shape])
        return load_shared_model(
            ModelSettings(
                path=self.job.model,
                dtype=self.job.dtype,  # type: ignore[arg-type]  # it checks
                quantized=self.job.quantized,  # type: ignore[arg-type]
            )
        )

    async def on_device(self, function: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self.device.call(function))

    async def make_learner(self, learning_rate: float) -> Learner:
        settings = LearnerSettings(learning_rate=learning_rate)
        return await self.on_device(
            lambda: Learner(self.model, self.streams, settings, start=self.adapter, total_steps=100, seed=self.job.seed)
        )

    async def update(self, learner: Learner, groups: Sequence[TrajectoryGroup], step: int) -> UpdateReport:
        units = learner.update(groups, step=step, max_tokens=self.job.max_tokens)
        report = await asyncio.wrap_future(self.device.iterate(units))
        assert report is not None, "an update ends with its report"
        return report

    def requests(self, name: str, prompts: int, sampling: SamplingParams) -> list[GenerationRequest]:
        """One request per problem, `group_size` completions each, with a seed of its own: single turns, as rollouts
        ask for them."""
        problems = load_problems(self.job.data, prompts)
        return [
            GenerationRequest(
                request_id=f"{name}-{place}",
                prompt_tokens=self.model.tokenizer.encode_chat(problem.messages),
                sampling=sampling,
                n=self.job.group_size,
                model=POLICY if self.job.lora else BASE,
                traffic="rollout",
                is_continued=False,
            )
            for place, problem in enumerate(problems)
        ]

    def close(self) -> None:
        self.device.stop()


async def open_workbench(job: Job) -> Workbench:
    return await Workbench(job).build()


def random_adapter(model: SharedModel, version: int, seed: int = 0) -> Adapter:
    """An adapter on all linear layers whose product is not zero."""
    arrays = initial_arrays(model.targets, RANK, mx.random.key(seed))
    keys = mx.random.split(mx.random.key(seed + 1), len(arrays))
    filled = {
        name: SIZE_OF_B * mx.random.normal(array.shape, key=key) if name.endswith(".lora_b") else array
        for key, (name, array) in zip(keys, arrays.items(), strict=True)
    }
    return make_adapter(filled, version=version, rank=RANK, alpha=ALPHA)


def scored_at_random(
    request: GenerationRequest, completions: Sequence[Completion], generator: random.Random
) -> TrajectoryGroup:
    """A group with signal: half of its completions, chosen at random, get reward 1."""
    winners = set(generator.sample(range(len(completions)), len(completions) // 2))
    problem = Problem(problem_id=request.request_id, messages=(), answer="")
    trajectories = []
    for place, completion in enumerate(completions):
        episode = Episode(problem=problem, request=request, index=place)
        episode.take(completion, completion.text)
        mask, reward = tuple(episode.is_sampled), float(place in winners)
        trajectories.append(trajectory_of(episode, reward=reward, parts={}, loss_mask=mask))
    return TrajectoryGroup(problem=problem, trajectories=tuple(trajectories))
