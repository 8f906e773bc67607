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
from parallm.learner.reward_model.pairs import Pair, Pairs, to_group
from parallm.learner.reward_model.reward_learner import RewardLearner
from parallm.learner.reward_model.scorer import RewardScorer
from parallm.learner.settings import LearnerSettings
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.reward_head import read_reward_model, with_reward_head
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.rollout.problems import ProblemStream
from parallm.rollout.reward_model import RewardModel
from parallm.rollout.settings import RewardModelSettings
from parallm.trainer.context import TrainerContext
from parallm.trainer.evaluators import PairEvaluator
from parallm.trainer.settings import TrainerSettings
from parallm.trainer.supervised_trainer import SupervisedData
from parallm.types import ScoringRequest, TrajectoryGroup


def reward_model_context(
    context: TrainerContext,
    pairs: Pairs,
    settings: LearnerSettings,
    trainer: TrainerSettings,
    *,
    model: SharedModel,
    streams: DeviceStreams,
    start: Adapter,
    seed: int,
) -> TrainerContext:
    """`context` for training a reward model that starts from `start`. Runs on the device thread.

    Its versions have a table of their own: the engine's table is for adapters that write text.
    """
    start = with_reward_head(start, model, seed)
    learner = RewardLearner(model, streams, settings, start=start, total_steps=trainer.steps, seed=seed)
    adapters = AdapterTable(policies=(start.name,))
    if start.version > 0:
        adapters.publish(start)
    held_out = _tokenized(pairs.held_out[: trainer.evaluate_problems], model)
    center = settings.center_scores
    evaluator = (
        PairEvaluator(device=context.device, learner=learner, pairs=held_out, center=center) if held_out else None
    )
    return dataclasses.replace(context, learner=learner, adapters=adapters, evaluator=evaluator)


def tokenize_pairs(pairs: Sequence[Pair], model: SharedModel, *, per_step: int, seed: int) -> SupervisedData:
    """Tokenized pairs in shuffled epochs. Raises ProblemError for a pair that cannot be used."""
    groups = _tokenized(pairs, model)
    stream = ProblemStream([group.problem for group in groups], seed)
    return SupervisedData(
        groups={group.problem.problem_id: group for group in groups}, stream=stream, per_step=per_step
    )


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


def _tokenized(pairs: Sequence[Pair], model: SharedModel) -> list[TrajectoryGroup]:
    return [to_group(pair, model.tokenizer, model.max_context) for pair in pairs]


async def _rate(device: DeviceThread, scorer: RewardScorer, items: Sequence[ScoringRequest]) -> list[float]:
    scores = await asyncio.wrap_future(device.score(scorer.units(items)))
    assert scores is not None, "scoring ends with the scores"
    return scores
