"""Parts of a run that trains a reward model, or is paid by one. `run/build_trainer.py` calls it."""

import asyncio
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from parallm.checkpoint.adapter_paths import find_adapter
from parallm.device.streams import DeviceStreams
from parallm.device.thread import DeviceThread
from parallm.learner.passes.packing import can_pack
from parallm.learner.passes.recomputation import pass_tokens
from parallm.learner.reward_model import RewardLearner, RewardScorer
from parallm.learner.settings import LearnerSettings
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.reward_head import read_reward_model, with_reward_head
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.rollout.reward_model import RewardModel
from parallm.rollout.settings import RewardModelSettings
from parallm.trainer.context import TrainerContext
from parallm.trainer.evaluators import PairEvaluator
from parallm.types import ScoringRequest, TrajectoryGroup


def reward_model_context(
    context: TrainerContext,
    held_out: Sequence[TrajectoryGroup],
    settings: LearnerSettings,
    *,
    model: SharedModel,
    streams: DeviceStreams,
    start: Adapter,
    total_steps: int,
    seed: int,
) -> TrainerContext:
    """`context` for training a reward model that starts from `start`. Runs on the device thread.

    Its versions have a table of their own: the engine's table is for adapters that write text.
    """
    start = with_reward_head(start, model, seed)
    learner = RewardLearner(model, streams, settings, start=start, total_steps=total_steps, seed=seed)
    adapters = AdapterTable(policies=(start.name,))
    if start.version > 0:
        adapters.publish(start)
    center = settings.center_scores
    evaluator = (
        PairEvaluator(device=context.device, learner=learner, pairs=held_out, center=center) if held_out else None
    )
    return dataclasses.replace(context, learner=learner, adapters=adapters, evaluator=evaluator)


def find_reward_model(settings: RewardModelSettings) -> Path | None:
    """The folder of the reward model in `settings`; None without one. Raises AdapterError if it is missing."""
    return None if settings.adapter is None else find_adapter(settings.adapter)


async def open_reward_model(
    settings: RewardModelSettings,
    learner: LearnerSettings,
    device: DeviceThread,
    model: SharedModel,
    streams: DeviceStreams,
) -> RewardModel | None:
    """The reward model in `settings`, on the shared base; None without one.

    Raises AdapterError if it is no reward model, or was trained on another base.
    """
    folder = find_reward_model(settings)
    if folder is None:
        return None

    def make() -> RewardScorer:
        adapter = read_reward_model(folder, model)
        return RewardScorer(model, streams, adapter, budget=pass_tokens(learner, model), packs=can_pack(model))

    scorer = await asyncio.wrap_future(device.call(make))
    return RewardModel(rate=partial(_rate, device, scorer), weight=settings.weight, tokenizer=model.tokenizer)


async def _rate(device: DeviceThread, scorer: RewardScorer, items: Sequence[ScoringRequest]) -> list[float]:
    scores = await asyncio.wrap_future(device.score(scorer.units(items)))
    assert scores is not None, "scoring ends with the scores"
    return scores
