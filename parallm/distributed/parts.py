"""The parts of a run that are different ones with several processes. `run/build_trainer.py` asks for each.

`Single` returns those of a process that trains alone; `Shared` wraps them, so nothing below knows of other workers.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from parallm.checkpoint.manager import CheckpointManager
from parallm.checkpoint.settings import CheckpointSettings
from parallm.device.thread import DeviceThread
from parallm.distributed.checkpoints import FollowerCheckpoints, LeaderCheckpoints, adopt_rescued
from parallm.distributed.collective import Collective
from parallm.distributed.collector import SharedCollector, SharedEvaluator
from parallm.distributed.exchange import Alone, Exchange
from parallm.distributed.learner import SharedLearner
from parallm.distributed.pacing import SharedPacing
from parallm.distributed.recorder import QuietRecorder, SharedRecorder
from parallm.distributed.rollout_engines.pool import EnginePool, open_pool
from parallm.distributed.rollouts import RolloutJoiner, RolloutPosts
from parallm.distributed.settings import DistributedSettings
from parallm.distributed.team import Team, difference
from parallm.distributed.wire import pack, unpack
from parallm.engine.async_engine import AsyncEngine
from parallm.errors import ConfigError
from parallm.learner.learner import Learner
from parallm.learner.reward_model import RewardLearner
from parallm.metrics.record import RunRecorder
from parallm.metrics.rollout_files import RolloutFiles
from parallm.metrics.rollout_format import Cut, StepRollouts, encode
from parallm.metrics.rollout_writer import RolloutWriter
from parallm.metrics.settings import MetricsSettings
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.rollout.collector import Collector
from parallm.rollout.evaluation import Evaluator
from parallm.rollout.runner import Generate
from parallm.tasks.encoder_learner import EncoderLearner
from parallm.trainer.pacing import Evaluate, Pacing, Save

MakePacing = Callable[[Save, Evaluate], Pacing]


class Single:
    """The parts of a process that trains alone."""

    is_leader = True
    """Whether this process writes the run folder."""
    takes_updates = True
    """Whether clients may ask for updates between steps."""

    def __init__(self) -> None:
        self._pools: dict[Path, EnginePool] = {}  # by the folder of the policy

    async def generate(
        self,
        engine: AsyncEngine,
        urls: Sequence[str],
        model: SharedModel,
        table: AdapterTable,
        device: DeviceThread,
        *,
        policy: str,
        folder: Path,
        defer: Callable[[Callable[[], Awaitable[None]]], object],
    ) -> Generate:
        """The sampler of rollouts and evaluations: this process's engine, or the engines at `urls`; see `open_pool`."""
        if not urls:
            return engine.completions
        pool = await open_pool(urls, engine, model, table, device, policy=policy, folder=folder, defer=defer)
        self._pools[folder] = pool
        return pool.completions

    def learner(self, *arguments: Any, **options: Any) -> Learner:
        return Learner(*arguments, **options)

    def collector(self, *arguments: Any, ahead: int) -> Collector:
        return Collector(*arguments)

    def evaluator(self, evaluator: Evaluator) -> Evaluator:
        return evaluator

    def checkpoints(self, folder: Path, settings: CheckpointSettings) -> CheckpointManager:
        adopt_rescued(folder)
        return CheckpointManager(folder, settings)

    def make_pacing(self, learner: Learner | RewardLearner | EncoderLearner) -> MakePacing:
        return Pacing

    def recorder(self, folder: Path, settings: MetricsSettings, config: Mapping[str, Any]) -> RunRecorder:
        if not config["rollout"]["engines"]:
            return RunRecorder(folder, settings, config)
        return SharedRecorder(
            folder, settings, config, lambda: self._pools[folder].take_figures() if folder in self._pools else {}
        )

    def rollout_writer(
        self, folder: Path, cut: Cut, *, max_bytes: int, is_decoding: Callable[[], bool], evaluated: Collection[int]
    ) -> RolloutWriter:
        """The writer of completions; for the arguments see `RolloutFiles` and `encode`."""

        def encoded(rollouts: StepRollouts, throttle: Callable[[], object]) -> bytes:
            return encode(rollouts, cut, throttle)

        return RolloutFiles(folder, encoded, max_bytes=max_bytes, is_decoding=is_decoding, evaluated=evaluated)

    async def largest(self, number: int) -> int:
        """The largest number that any worker gives."""
        return number

    async def leave(self) -> None:
        """Need no other worker from now on: training has come to its end."""

    async def check_same(self, facts: Mapping[str, Any], learner: Learner | RewardLearner | EncoderLearner) -> None:
        """Raise ConfigError with rank and key unless all workers have the same `facts`, and learners of one plan."""


class Shared(Single):
    """The parts of one of several workers, or of one that computes as several would (`distributed.exact`)."""

    takes_updates = False

    def __init__(self, exchange: Exchange, settings: DistributedSettings, run_folder: Path | None) -> None:
        """`run_folder`: that of rank 0; None for a process alone."""
        super().__init__()
        self._exchange = exchange
        self._settings = settings
        self._run_folder = run_folder
        self._flaw = ""
        self._writers: list[RolloutWriter] = []
        self._numbers = itertools.count()
        self.is_leader = exchange.rank == 0

    def learner(self, *arguments: Any, **options: Any) -> Learner:
        exact, slots = self._settings.exact, self._settings.slots
        return SharedLearner(*arguments, exchange=self._exchange, exact=exact, slots=slots, **options)

    def collector(self, *arguments: Any, ahead: int) -> Collector:
        return SharedCollector(*arguments, exchange=self._exchange, ahead=ahead)

    def evaluator(self, evaluator: Evaluator) -> Evaluator:
        values = {field.name: getattr(evaluator, field.name) for field in fields(evaluator)}
        return SharedEvaluator(**values, exchange=self._exchange)

    def checkpoints(self, folder: Path, settings: CheckpointSettings) -> CheckpointManager:
        share = self._exchange.gather
        if self._run_folder is not None and not self.is_leader:
            return FollowerCheckpoints(
                folder,
                settings,
                leader=self._run_folder,
                share=share,
                flaw=lambda: self._flaw,
            )
        adopt_rescued(folder)
        return LeaderCheckpoints(folder, settings, share=share, flaw=lambda: self._flaw)

    def make_pacing(self, learner: Learner | RewardLearner | EncoderLearner) -> MakePacing:
        return partial(
            SharedPacing,
            exchange=self._exchange,
            version=lambda: (learner.adapter.version, learner.adapter.digest),
            on_difference=self._set_flaw,
        )

    def recorder(self, folder: Path, settings: MetricsSettings, config: Mapping[str, Any]) -> RunRecorder:
        if not self.is_leader:
            return QuietRecorder(folder, settings, config)
        take = self._exchange.take_seconds
        return SharedRecorder(folder, settings, config, take, has_failed=lambda: self._exchange.failure is not None)

    def rollout_writer(
        self, folder: Path, cut: Cut, *, max_bytes: int, is_decoding: Callable[[], bool], evaluated: Collection[int]
    ) -> RolloutWriter:
        writer: RolloutWriter
        if self.is_leader:
            join = RolloutJoiner(self._exchange, cut).encode
            writer = RolloutFiles(folder, join, max_bytes=max_bytes, is_decoding=is_decoding, evaluated=evaluated)
        else:
            writer = RolloutPosts(self._exchange, cut, is_decoding)
        self._writers.append(writer)
        return writer

    async def largest(self, number: int) -> int:
        return max(value for value, *_ in await self._gather([number]))

    async def leave(self) -> None:
        self._exchange.finish()
        for writer in self._writers:
            await asyncio.to_thread(writer.close)
        self._exchange.close()

    async def check_same(self, facts: Mapping[str, Any], learner: Learner | RewardLearner | EncoderLearner) -> None:
        assert isinstance(learner, SharedLearner), "reward models are trained by one process"
        parts = await self._gather({**facts, **learner.plan})
        for rank, part in enumerate(parts):
            if mistake := difference(parts[0], part, rank):
                raise ConfigError(mistake)

    async def _gather(self, value: Any) -> list[Any]:
        label = f"start {next(self._numbers)}"
        return [unpack(part)[0] for part in await asyncio.wrap_future(self._exchange.gather(label, pack(value)))]

    def _set_flaw(self, flaw: str) -> None:
        self._flaw = flaw


def parts_for(settings: DistributedSettings, team: Team | None) -> Single:
    """The parts of this process. Joins the group of mx.distributed. Raises ConfigError, ExchangeFailed."""
    if team is not None:
        exchange = Collective(team.channel, team.identity.backend, exact=settings.exact)
        return Shared(exchange, settings, team.run_folder)
    if (settings.workers or 1) > 1:
        raise ConfigError(
            f"distributed.workers={settings.workers}: several workers are several processes; `python -m parallm.train` "
            "starts them, and a Python program is one of them"
        )
    return Shared(Alone(), settings, None) if settings.engine != "off" else Single()
