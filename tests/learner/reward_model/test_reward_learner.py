"""The update of a reward model against plain automatic differentiation of whole rows."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.device.streams import DeviceStreams
from parallm.learner.adapter_learner import OptimizerStep
from parallm.learner.passes.batch import make_passes
from parallm.learner.reward_model import RewardLearner, pair_loss, split_completions, to_scoring_request
from parallm.learner.settings import LearnerSettings
from parallm.model.adapters.adapter import REWARD_HEAD, Adapter
from parallm.model.adapters.reward_head import with_reward_head
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.single import single_lora
from parallm.model.shared_model import SharedModel
from parallm.reports import UpdateReport
from parallm.types import ScoringRequest, TrajectoryGroup

Arrays = dict[str, mx.array]
Load = Callable[[str], SharedModel]
MakeStart = Callable[..., Adapter]
MakeGroup = Callable[..., TrajectoryGroup]
CENTER = 0.1


@pytest.fixture
def groups(make_group: MakeGroup) -> list[TrajectoryGroup]:
    """Pairs of different lengths, a completion of one token among them; two have a margin."""
    return [
        make_group(1, (12, 3), (0.5, 0.0)),
        make_group(2, (1, 6), (0.0, 0.0), prompt_length=1),
        make_group(3, (2, 20), (2.0, 0.0), prompt_length=25),
        make_group(4, (7, 7), (0.0, 0.0)),
    ]


def plain(model: SharedModel, adapter: Adapter, groups: list[TrajectoryGroup]) -> tuple[float, Arrays]:
    """Loss and gradient with one forward of mlx-lm's own for each completion, written as the papers write it."""

    def score(arrays: Arrays, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> mx.array:
        hidden = model.hidden(mx.array([[*prompt, *tokens]]), None, single_lora(arrays, lora_scaling(adapter, model)))
        return hidden[0, -1].astype(mx.float32) @ arrays[REWARD_HEAD]

    def loss(arrays: Arrays) -> mx.array:
        losses = []
        for group in groups:
            chosen, rejected = (score(arrays, one.prompt_tokens, tuple(one.tokens)) for one in group.trajectories)
            margin = group.rewards[0] - group.rewards[1]
            losses.append(-mx.log(mx.sigmoid(chosen - rejected - margin)) + CENTER * (chosen + rejected) ** 2)
        return mx.stack(losses).mean()

    value, gradients = mx.value_and_grad(loss)(dict(adapter.arrays))
    mx.eval(value, gradients)
    return float(value.item()), gradients


def cut(
    model: SharedModel,
    streams: DeviceStreams,
    adapter: Adapter,
    groups: list[TrajectoryGroup],
    *,
    budget: int = 4096,
    packs: bool | None = None,
) -> tuple[float, Arrays]:
    """Loss and gradient as an update computes them."""
    settings = LearnerSettings(trains="reward_model", micro_batch_tokens=budget, center_scores=CENTER)
    learner = RewardLearner(model, streams, settings, start=adapter, total_steps=1, seed=0)
    learner._packs = learner._packs if packs is None else packs
    taken: list[mx.array] = []
    compute_step = learner.compute_step

    def take(gradient_N: mx.array, step: int) -> OptimizerStep:
        taken.append(gradient_N)
        return compute_step(gradient_N, step)

    learner.compute_step = take  # type: ignore[method-assign]
    (*_, report) = learner.update(groups, step=0, max_tokens=1)
    assert report is not None
    return report.loss, learner.layout.split(taken[0])


def assert_close(found: tuple[float, Arrays], expected: tuple[float, Arrays]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    norm = math.sqrt(sum(float((array**2).sum().item()) for array in expected[1].values()))
    for name, gradient in expected[1].items():
        assert float(mx.linalg.norm(found[1][name] - gradient).item()) <= 1e-6 * norm, name


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma2", "mixtral"])
def test_loss_and_gradient_are_those_of_plain_differentiation(
    load_tiny: Load, streams: DeviceStreams, make_start: MakeStart, groups: list[TrajectoryGroup], architecture: str
) -> None:
    model = load_tiny(architecture)
    start = with_reward_head(make_start(model), model, 0)
    assert_close(cut(model, streams, start, groups), plain(model, start, groups))


@pytest.mark.parametrize("choice", [{"budget": 16}, {"budget": 50}, {"packs": False}], ids=str)
def test_the_gradient_does_not_depend_on_how_the_work_is_cut(
    load_tiny: Load,
    streams: DeviceStreams,
    make_start: MakeStart,
    groups: list[TrajectoryGroup],
    choice: dict[str, Any],
) -> None:
    model = load_tiny("qwen3")
    start = with_reward_head(make_start(model), model, 0)
    assert_close(cut(model, streams, start, groups, **choice), cut(model, streams, start, groups))


def test_the_gradient_does_not_depend_on_the_number_of_lanes(
    load_tiny: Load, streams: DeviceStreams, make_start: MakeStart, groups: list[TrajectoryGroup]
) -> None:
    model = load_tiny("qwen3")
    start = with_reward_head(make_start(model), model, 0)
    one, two = copy.copy(streams), copy.copy(streams)
    one.handles = streams.handles[:1]
    two.handles = [streams.handles[0], streams.handles[-1]]
    assert_close(cut(model, one, start, groups, budget=64), cut(model, two, start, groups, budget=64))


def test_the_loss_of_a_pair_is_the_negative_log_likelihood_of_its_order() -> None:
    chosen, rejected, margin = (mx.array(values) for values in ([1.0, 0.0, -2.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.5]))
    found = np.array(pair_loss(chosen, rejected, margin, center=0.0))
    assert found == pytest.approx([0.31326169, math.log(2), 3.52975], abs=1e-6)
    centered = np.array(pair_loss(chosen, rejected, margin, center=0.01))
    assert centered - found == pytest.approx([0.01, 0.0, 0.01], abs=1e-6)


@pytest.mark.parametrize(("difference", "loss", "gradient"), [(100.0, 0.0, 0.0), (-100.0, 100.0, -1.0)])
def test_the_loss_of_a_pair_far_apart_is_finite(difference: float, loss: float, gradient: float) -> None:
    zero = mx.array([0.0])
    value, slope = mx.value_and_grad(lambda chosen: pair_loss(chosen, zero, zero, center=0.0).sum())(
        mx.array([difference])
    )
    assert (float(value.item()), float(slope.item())) == pytest.approx((loss, gradient), abs=1e-6)


def update(learner: RewardLearner, groups: list[TrajectoryGroup], step: int) -> UpdateReport:
    (*_, report) = learner.update(groups, step=step, max_tokens=1)
    assert report is not None
    return report


def make_learner(model: SharedModel, streams: DeviceStreams, start: Adapter, **settings: Any) -> RewardLearner:
    chosen = LearnerSettings(trains="reward_model", **({"learning_rate": 5e-3, "warmup_steps": 0} | settings))
    return RewardLearner(model, streams, chosen, start=start, total_steps=9, seed=0)


def test_updates_make_versions_that_tell_the_pairs_apart(
    load_tiny: Load, streams: DeviceStreams, make_start: MakeStart, groups: list[TrajectoryGroup]
) -> None:
    model = load_tiny("qwen3")
    learner = make_learner(model, streams, with_reward_head(make_start(model, dropout=0.1), model, 0))
    before = learner.adapter
    reports = [update(learner, groups, step) for step in range(8)]
    assert [report.version for report in reports] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert reports[-1].loss < 0.5 * reports[0].loss
    assert reports[-1].pairs is not None
    assert reports[-1].pairs.accuracy == 1.0
    assert all((learner.adapter.arrays[name] != array).any().item() for name, array in before.arrays.items())


def test_the_report_says_what_the_scorer_says(
    load_tiny: Load, streams: DeviceStreams, make_start: MakeStart, groups: list[TrajectoryGroup]
) -> None:
    model = load_tiny("qwen3")
    learner = make_learner(model, streams, with_reward_head(make_start(model), model, 0))
    (*_, scores) = learner.scorer().units([to_scoring_request(group) for group in groups])
    assert scores is not None
    margins = [chosen - rejected for chosen, rejected in zip(scores[0::2], scores[1::2], strict=True)]
    pairs = update(learner, groups, 0).pairs
    assert pairs is not None
    assert pairs.margin == pytest.approx(sum(margins) / 4, rel=1e-5)
    assert pairs.accuracy == sum(margin > 0 for margin in margins) / 4


def test_a_step_with_a_loss_that_is_not_finite_changes_nothing(
    load_tiny: Load, streams: DeviceStreams, make_start: MakeStart, groups: list[TrajectoryGroup]
) -> None:
    model = load_tiny("qwen3")
    learner = make_learner(model, streams, with_reward_head(make_start(model), model, 0))
    before = learner.adapter
    large = replace(groups[0].trajectories[0], reward=3e38)
    broken = replace(groups[0], trajectories=(large, replace(groups[0].trajectories[1], reward=-3e38)))
    report = update(learner, [broken], 0)
    assert (report.fault, learner.adapter) == ("loss", before)
    assert report.skipped == "the loss is not finite"
    learner = make_learner(model, streams, before, learning_rate=1e38)
    assert update(learner, groups, 0).fault == "weights"
    assert learner.adapter is before
    assert learner.optimizer_state()["others.step"].item() == 0


def test_a_roll_back_brings_the_weights_before_the_newest_update_under_a_new_number(
    load_tiny: Load, streams: DeviceStreams, make_start: MakeStart, groups: list[TrajectoryGroup]
) -> None:
    model = load_tiny("qwen3")
    learner = make_learner(model, streams, with_reward_head(make_start(model), model, 0))
    update(learner, groups, 0)
    first = learner.adapter
    update(learner, groups, 1)
    back = learner.roll_back()
    assert (back.digest, back.version, back.parent) == (first.digest, 3, 1)


def scores_with(learner: RewardLearner, items: list[ScoringRequest]) -> list[float]:
    units: Iterator[list[float] | None] = learner.scorer().units(items)
    (*_, scores) = units
    assert scores is not None
    return scores


def test_scores_do_not_depend_on_company(load_tiny: Load, streams: DeviceStreams, make_start: MakeStart) -> None:
    model = load_tiny("qwen3")
    start = with_reward_head(make_start(model), model, 0)
    items = [
        ScoringRequest(prompt_tokens=(3, 1, 4), completions=((9, 2), (6,), (5, 3, 5), (8, 9, 7))),
        ScoringRequest(prompt_tokens=(2, 7, 1, 8), completions=((2, 8),)),
    ]
    alone = [
        scores_with(make_learner(model, streams, start), [replace(item, completions=(tokens,))])[0]
        for item in items
        for tokens in item.completions
    ]
    for budget in (16, 4096):
        together = scores_with(make_learner(model, streams, start, micro_batch_tokens=budget), items)
        assert together == pytest.approx(alone, rel=1e-5)


def test_a_group_is_split_within_the_budget_and_no_completion_is_lost() -> None:
    item = ScoringRequest(prompt_tokens=(1, 2, 3), completions=((4, 4), (5,), (6, 6, 6), (7, 7, 7, 7, 7, 7, 7), (8,)))
    parts = split_completions(item, 8)
    assert [part.completions for part in parts] == [
        ((4, 4), (5,)),
        ((6, 6, 6),),
        ((7, 7, 7, 7, 7, 7, 7),),
        ((8,),),
    ]
    assert all(part.num_tokens <= 8 for part in parts if len(part.completions) > 1)


def test_passes_hold_every_item_once_within_the_budget_and_fill_all_streams() -> None:
    sizes = [9, 1, 30, 4, 4, 4, 12]
    passes = make_passes(sizes, 16, 2)
    assert sorted(place for one in passes for place in one) == list(range(7))
    assert all(len(one) == 1 or sum(sizes[place] for place in one) <= 16 for one in passes)
    totals = [sum(sizes[place] for place in one) for one in passes]
    assert totals == sorted(totals, reverse=True)
    assert make_passes([], 16, 2) == []
