"""What is not finite: it is named with the trajectories to blame, and nothing changes because of it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from parallm.device.streams import DeviceStreams
from parallm.errors import AdapterNotFinite
from parallm.learner.learner import Learner
from parallm.learner.passes.gradient import PolicyGradient
from parallm.learner.settings import LearnerSettings
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.shared_model import SharedModel
from parallm.reports import FaultKind, UpdateReport
from parallm.types import Trajectory, TrajectoryGroup

MakeLearner = Callable[..., Learner]


@pytest.fixture
def make_learner(
    load_tiny: Callable[[str], SharedModel], streams: DeviceStreams, make_start: Callable[..., Adapter]
) -> MakeLearner:
    def make(factor: float = 1.0, **values: object) -> Learner:
        model = load_tiny("qwen3")
        settings = LearnerSettings(**({"warmup_steps": 0, "learning_rate": 1e-3} | values))  # type: ignore[arg-type]
        start = make_start(model)
        arrays = {name: factor * array for name, array in start.arrays.items()}
        start = make_adapter(arrays, version=3, rank=4, alpha=8.0)
        return Learner(model, streams, settings, start=start, total_steps=10, seed=0)

    return make


@pytest.fixture
def groups(make_group: Callable[..., TrajectoryGroup]) -> list[TrajectoryGroup]:
    return [make_group(1, (12, 3, 1), (1.0, 0.0, 0.5)), make_group(2, (5, 6), (0.0, 1.0))]


def update(learner: Learner, groups: Sequence[TrajectoryGroup], step: int = 0) -> UpdateReport:
    report = list(learner.update(groups, step=step, max_tokens=40))[-1]
    assert isinstance(report, UpdateReport)
    return report


def moments_of(learner: Learner) -> dict[str, object]:
    return {name: array.tolist() for name, array in learner.optimizer_state().items()}


def changed(groups: Sequence[TrajectoryGroup], group: int, index: int, /, **values: object) -> list[TrajectoryGroup]:
    """The groups with some fields of one trajectory replaced."""
    chosen: Trajectory = groups[group].trajectories[index]
    if isinstance(values.get("logprobs"), float):
        values["logprobs"] = (values["logprobs"],) * len(chosen.tokens)
    trajectories = list(groups[group].trajectories)
    trajectories[index] = replace(chosen, **values)  # type: ignore[arg-type]
    copied = list(groups)
    copied[group] = replace(groups[group], trajectories=tuple(trajectories))
    return copied


@pytest.mark.parametrize(
    ("place", "values", "fault", "reason"),
    [
        ((1, 1), {"logprobs": math.nan}, "behaviour", "the sampled log-prob of token 0 is nan"),
        ((0, 0), {"logprobs": math.inf}, "behaviour", "the sampled log-prob of token 0 is inf"),
        # a ratio whose square is too large for float32, and one that is so itself; bad completions are not clipped
        ((0, 1), {"logprobs": -75.0}, "gradient", "the squared ratio of token 0 is inf"),
        ((0, 1), {"logprobs": -300.0}, "loss", "the squared ratio of token 0 is inf"),
    ],
    ids=[
        "log-prob nan",
        "log-prob inf",
        "gradient inf",
        "loss inf",
    ],
)
def test_what_is_not_finite_changes_nothing_and_is_traced_to_its_trajectory(
    make_learner: MakeLearner,
    groups: list[TrajectoryGroup],
    place: tuple[int, int],
    values: dict[str, float],
    fault: FaultKind,
    reason: str,
) -> None:
    learner, untroubled = make_learner(), make_learner()
    for each in (learner, untroubled):
        update(each, groups, step=0)
    before, moments = learner.adapter, moments_of(learner)
    report = update(learner, changed(groups, place[0], place[1], **values), step=1)
    assert report.fault == fault
    assert [(one.group, one.index, one.reason) for one in report.culprits] == [(*place, reason)]
    assert report.skipped is not None
    assert f"completion {place[1]}: {reason}" in report.skipped
    assert (report.version, learner.adapter, moments_of(learner)) == (before.version, before, moments)
    for each in (learner, untroubled):
        assert update(each, groups, step=2).skipped is None
    assert learner.adapter.digest == untroubled.adapter.digest


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"reward": math.nan}, "reward nan"),
        ({"reward": -math.inf}, "reward -inf"),
        ({"reward": 1e39}, "reward 1e+39"),
        ({"token_advantages": (1.0, math.nan, 0.0)}, "its token advantages"),
    ],
    ids=["nan", "inf", "no float32", "advantages"],
)
@pytest.mark.parametrize("advantage", ["group_mean", "batch_std", "reinforce_pp"])
def test_a_reward_that_float32_cannot_hold_leaves_out_its_completion_alone(
    make_learner: MakeLearner, groups: list[TrajectoryGroup], advantage: str, values: dict[str, Any], reason: str
) -> None:
    learner, untroubled = make_learner(advantage=advantage), make_learner(advantage=advantage)
    report = update(learner, changed(groups, 0, 1, **values))
    assert (report.skipped, report.fault, report.culprits) == (None, None, ())
    assert [(one.group, one.index, one.reason) for one in report.left_out] == [(0, 1, reason)]
    first, *others = groups
    without = replace(first, trajectories=(first.trajectories[0], first.trajectories[2]))
    assert update(untroubled, [without, *others]).loss == report.loss
    assert learner.adapter.digest == untroubled.adapter.digest


def test_later_faults_are_traced_past_what_was_left_out(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    broken = changed(changed(groups, 0, 1, reward=math.nan), 0, 2, logprobs=math.nan)
    broken = changed(changed(broken, 1, 0, reward=math.inf), 1, 1, reward=math.inf)
    report = update(make_learner(), broken)
    assert report.fault == "behaviour"
    assert [(one.group, one.index) for one in report.culprits] == [(0, 2)]
    assert [(one.group, one.index) for one in report.left_out] == [(0, 1), (1, 0), (1, 1)]


def test_without_any_reward_nothing_is_computed_and_nothing_changes(
    make_learner: MakeLearner, groups: list[TrajectoryGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(PolicyGradient, "__call__")
    learner = make_learner()
    report = update(learner, changed(changed(groups[1:], 0, 0, reward=math.nan), 0, 1, reward=1e39))
    assert report.fault == "reward"
    assert report.skipped == (
        "no reward is a number that float32 can hold (problem p, completion 0: reward nan; problem p, completion 1: "
        "reward 1e+39)"
    )
    assert (report.num_tokens, report.parity.num_tokens, report.left_out) == (0, 0, ())
    assert all(map(math.isnan, (report.loss, report.gradient_norm, report.entropy, report.kl_to_behaviour)))
    assert report.version == learner.adapter.version == 3


@pytest.mark.filterwarnings("ignore:overflow")
def test_an_advantage_that_float32_cannot_hold_is_named(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    far = changed(changed(changed(groups, 0, 0, reward=3e38), 0, 1, reward=-3e38), 0, 2, reward=-3e38)
    report = update(make_learner(advantage="group_mean"), far)
    assert report.fault == "advantage"
    assert [(one.group, one.index, one.reason) for one in report.culprits] == [
        (0, 0, "the advantage of token 0 is inf"),
    ]


def test_weights_that_overflow_the_forward_pass_are_found_by_their_log_probs(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    learner = make_learner(factor=1e18)
    before, moments = learner.adapter, moments_of(learner)
    report = update(learner, groups)
    assert report.fault == "logprob"
    assert {(one.group, one.index) for one in report.culprits} == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)}
    assert learner.adapter is before
    assert moments_of(learner) == moments


def test_weights_that_would_not_be_finite_never_become_a_version(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    learner = make_learner(learning_rate=1e39)
    before, moments = learner.adapter, moments_of(learner)
    report = update(learner, groups)
    assert (report.fault, report.skipped, report.culprits) == ("weights", "the new weights are not finite", ())
    assert learner.adapter is before
    assert moments_of(learner) == moments


def test_without_a_ratio_to_blame_the_whole_micro_batch_is_named(
    make_learner: MakeLearner, groups: list[TrajectoryGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = PolicyGradient.__call__

    def broken(self: PolicyGradient, *arguments: object) -> object:
        result = compute(self, *arguments)  # type: ignore[arg-type]
        return replace(result, gradients=[mx.full(one.shape, math.nan) for one in result.gradients])

    monkeypatch.setattr(PolicyGradient, "__call__", broken)
    report = update(make_learner(), groups)
    assert report.fault == "gradient"
    assert len(report.culprits) == 5
    assert report.skipped is not None
    assert report.skipped.endswith("; and 2 more)")


def test_an_empty_completion_trains_nothing_and_harms_nothing(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    nothing = {"tokens": (), "logprobs": (), "loss_mask": (), "weight_versions": ()}
    with_empty = changed(changed(groups, 0, 2, **nothing), 1, 0, **nothing)
    report = update(make_learner(), with_empty)
    assert (report.skipped, report.num_tokens) == (None, 11 + 2 + 5)
    only_empty = changed(changed(groups[1:], 0, 0, **nothing), 0, 1, **nothing)
    learner = make_learner()
    before = learner.adapter
    assert update(learner, only_empty).skipped == "no tokens with signal"
    assert learner.adapter is before


def test_rewards_that_are_not_finite_count_as_a_signal(groups: list[TrajectoryGroup]) -> None:
    alike = changed(groups, 1, 1, reward=0.0)[1]
    assert not alike.has_signal
    broken = replace(alike, trajectories=tuple(replace(one, reward=math.nan) for one in alike.trajectories))
    assert broken.has_signal


def test_advantages_of_tokens_are_a_signal_unless_all_are_zero(groups: list[TrajectoryGroup]) -> None:
    alike = changed(groups, 1, 1, reward=0.0)[1]
    assert changed([alike], 0, 0, token_advantages=(0.0, 1.0))[0].has_signal
    assert not changed([alike], 0, 0, token_advantages=(0.0, 0.0))[0].has_signal


@pytest.fixture
def trained(make_learner: MakeLearner, groups: list[TrajectoryGroup]) -> tuple[Learner, Learner]:
    """A learner after two updates, and its twin after the first of them."""
    learner, twin = make_learner(), make_learner()
    update(twin, groups, 0)
    for step in range(2):
        update(learner, groups, step)
    return learner, twin


def test_rolling_back_undoes_the_newest_update_under_a_new_number(
    trained: tuple[Learner, Learner], groups: list[TrajectoryGroup]
) -> None:
    learner, twin = trained
    assert learner.adapter.version == 5
    restored = learner.roll_back()
    assert restored is learner.adapter
    assert (restored.version, restored.parent, restored.digest) == (6, 4, twin.adapter.digest)
    assert moments_of(learner) == moments_of(twin)
    for each in trained:
        update(each, groups, step=2)
    assert learner.adapter.digest == twin.adapter.digest
    assert (learner.adapter.version, learner.adapter.parent) == (7, 6)


def test_there_is_nothing_to_roll_back_twice_nor_before_the_first_update(
    trained: tuple[Learner, Learner], make_learner: MakeLearner
) -> None:
    learner, _ = trained
    assert learner.roll_back().version == learner.roll_back().version == 6
    assert make_learner().roll_back().version == 3


def test_a_restored_learner_rolls_back_to_what_it_was_restored_to(
    trained: tuple[Learner, Learner], groups: list[TrajectoryGroup]
) -> None:
    learner, twin = trained
    learner.restore(twin.adapter, twin.optimizer_state())
    update(learner, groups, step=1)
    assert learner.roll_back().digest == twin.adapter.digest


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_adapter_that_is_not_finite_is_refused_by_the_name_of_its_array(value: float) -> None:
    arrays = {"layer.lora_a": mx.ones((3, 2)), "layer.lora_b": mx.array([[0.0, value]] * 2)}
    with pytest.raises(AdapterNotFinite, match=r"layer\.lora_b holds values that are not finite"):
        make_adapter(arrays, version=1, rank=2, alpha=4)
