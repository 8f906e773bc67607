"""Whole updates: what changes, what is reported, and what is skipped."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import mlx.core as mx
import numpy as np
import pytest

from parallm.device.streams import DeviceStreams
from parallm.learner.learner import Learner
from parallm.learner.loss.objective import resolve_objective
from parallm.learner.passes.batch import MicroBatch, PlannedBatches, make_micro_batches
from parallm.learner.passes.gradient import LoraWeights, TokenStatistics
from parallm.learner.settings import LearnerSettings, Preset
from parallm.learner.totals import UpdateTotals
from parallm.model.adapters.adapter import Adapter
from parallm.model.kernels.flash_attention import FORWARD, KEYS, QUERIES
from parallm.model.shared_model import SharedModel
from parallm.reports import UpdateReport
from parallm.types import TrajectoryGroup, WeightSpan

MakeGroup = Callable[..., TrajectoryGroup]
MakeLearner = Callable[..., Learner]


@pytest.fixture
def make_learner(
    load_tiny: Callable[[str], SharedModel], streams: DeviceStreams, make_start: Callable[..., Adapter]
) -> MakeLearner:
    def make(dropout: float = 0.0, seed: int = 0, **values: object) -> Learner:
        model = load_tiny("qwen3")
        settings = LearnerSettings(**({"warmup_steps": 0, "learning_rate": 1e-3} | values))  # type: ignore[arg-type]
        return Learner(model, streams, settings, start=make_start(model, dropout=dropout), total_steps=10, seed=seed)

    return make


@pytest.fixture
def groups(make_group: MakeGroup) -> list[TrajectoryGroup]:
    return [make_group(1, (12, 3, 1), (1.0, 0.0, 0.5)), make_group(2, (5, 6), (0.0, 1.0))]


def update(learner: Learner, groups: Sequence[TrajectoryGroup], step: int = 0) -> UpdateReport:
    report = list(learner.update(groups, step=step, max_tokens=40))[-1]
    assert isinstance(report, UpdateReport)
    return report


def with_first(groups: Sequence[TrajectoryGroup], **values: object) -> list[TrajectoryGroup]:
    """The groups with some fields of the very first trajectory replaced."""
    first, *others = groups[0].trajectories
    changed = replace(first, **values)  # type: ignore[arg-type]
    return [replace(groups[0], trajectories=(changed, *others)), *groups[1:]]


def test_an_update_makes_the_next_version_and_leaves_the_old_one_alone(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    learner = make_learner()
    old = learner.adapter
    before = {name: array.tolist() for name, array in old.arrays.items()}
    report = update(learner, groups, step=4)
    new = learner.adapter
    assert (new.version, new.parent, new.step) == (4, 3, 5)
    assert (report.version, report.step, report.skipped) == (4, 4, None)
    assert new.digest != old.digest
    assert {name: array.tolist() for name, array in old.arrays.items()} == before
    assert (new.rank, new.alpha, new.targets) == (old.rank, old.alpha, old.targets)


@pytest.mark.parametrize("checkpoint_layers", ["none", "all"])
def test_an_update_over_rows_of_their_own_lengths_is_that_over_rectangles(
    checkpoint_layers: str, make_learner: MakeLearner, groups: list[TrajectoryGroup], request: pytest.FixtureRequest
) -> None:
    values = {"micro_batch_tokens": 40, "head_chunk_bytes": 1 << 16, "checkpoint_layers": checkpoint_layers}
    plain = make_learner(**values)
    expected = update(plain, groups)
    launches = request.getfixturevalue("fused_rows")
    fused = make_learner(**values)
    launches.clear()
    report = update(fused, groups)
    assert {FORWARD, QUERIES, KEYS} == set(launches)
    assert report.loss == pytest.approx(expected.loss, rel=1e-4)
    assert report.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-3)
    for name, array in fused.adapter.arrays.items():
        assert mx.abs(array - plain.adapter.arrays[name]).max().item() <= 2e-4, name


def test_completions_that_are_not_long_and_equal_stay_rows(make_group: MakeGroup) -> None:
    def runs_of(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
        group = make_group(1, lengths, tuple(float(index) for index in range(len(lengths))))
        batches = make_micro_batches(
            [group], resolve_objective(LearnerSettings()), max_tokens=40, budget=9999, takes_rows=True
        )
        assert sum(len(batch.inputs_M) for batch in batches) == 9 + sum(lengths) - len(lengths)
        return [run for batch in batches for segment in batch.segments for run in segment.runs]

    assert runs_of((5, 12, 6)) == [(1, 11), (1, 5), (1, 4)]
    assert runs_of((601, 601, 601)) == [(3, 600)]


def test_the_same_update_gives_the_same_adapter(make_learner: MakeLearner, groups: list[TrajectoryGroup]) -> None:
    one, other = make_learner(), make_learner()
    for step in range(2):
        assert replace(update(one, groups, step), seconds=0) == replace(update(other, groups, step), seconds=0)
    assert one.adapter.digest == other.adapter.digest


def test_the_size_of_micro_batches_does_not_change_the_report(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    reports = [update(make_learner(micro_batch_tokens=tokens), groups) for tokens in (16, 40, 2048)]
    for name in ("loss", "gradient_norm", "kl_to_behaviour", "entropy", "clip_fraction", "num_tokens"):
        first, *others = (getattr(report, name) for report in reports)
        assert others == pytest.approx([first, first], rel=1e-5)


def test_an_update_can_be_interrupted_between_its_micro_batches(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    learner = make_learner(micro_batch_tokens=16)
    units = learner.update(groups, step=0, max_tokens=40)
    before = learner.adapter.digest
    kinds = [(type(unit), learner.adapter.digest == before) for unit in units]
    assert len(kinds) > 2
    assert kinds[:-1] == [(type(None), True)] * (len(kinds) - 1)
    assert kinds[-1] == (UpdateReport, False)


@pytest.mark.cpu
@pytest.mark.parametrize("checkpoint_layers", ["none", "all"])
def test_a_pass_that_answers_wait_for_is_computed_in_parts_and_gives_the_same(
    make_learner: MakeLearner, groups: list[TrajectoryGroup], checkpoint_layers: str
) -> None:
    arrays, counts = [], []
    for waits in ([], [True] * 1000, [True, True, False, True]):
        waiting = iter(waits)
        learner = make_learner(checkpoint_layers=checkpoint_layers, micro_batch_tokens=16)
        learner._is_waited_for = lambda waiting=waiting: next(waiting, False)  # type: ignore[misc]
        counts.append(len(list(learner.update(groups, step=0, max_tokens=40))))
        arrays.append(learner.adapter.arrays)
    for name, array in arrays[0].items():
        assert mx.array_equal(array, arrays[1][name]).item()
        assert mx.array_equal(array, arrays[2][name]).item()
    rounds = counts[0] - 1
    assert counts[1] >= rounds * 5
    assert counts[0] < counts[2] < counts[1]


def test_a_policy_that_gives_the_sampled_log_probs_is_exactly_on_policy(
    make_learner: MakeLearner, groups: list[TrajectoryGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner()
    found: list[list[float]] = []
    add = UpdateTotals.add

    def recorded(self: UpdateTotals, batch: MicroBatch, statistics: TokenStatistics, version: int) -> None:
        found.append(np.array(statistics.logprobs_N).tolist())
        add(self, batch, statistics, version)

    monkeypatch.setattr(UpdateTotals, "add", recorded)
    one_each = [replace(group, trajectories=(one, one)) for group in groups for one in group.trajectories[:1]]
    first = update(make_learner(), one_each)
    assert first.parity.bit_equal_fraction == 0
    assert first.kl_to_behaviour > 0
    own = []
    for group in one_each:
        (mine,) = [values for values in found if len(values) == 2 * len(group.trajectories[0].tokens)]
        logprobs = tuple(mine[: len(mine) // 2])
        good, bad = (replace(group.trajectories[0], logprobs=logprobs, reward=reward) for reward in (1.0, 0.0))
        own.append(replace(group, trajectories=(good, bad)))
    report = update(learner, own)
    assert report.parity.bit_equal_fraction == 1.0
    assert (report.parity.max_abs, report.clip_fraction, report.kl_to_behaviour) == (0.0, 0.0, 0.0)


def test_parity_is_about_tokens_of_the_present_version_alone_and_ratios_about_the_others(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    learner = make_learner()  # at version 3, as all groups are
    whole = update(make_learner(), groups)
    assert (whole.parity.num_tokens, whole.ratio.num_tokens) == (whole.num_tokens, 0)
    assert math.isnan(whole.ratio.mean)
    # the first of 12 tokens is of version 3, and what follows was sampled over its keys and values
    spans = (WeightSpan(version=3, start=0, end=1), WeightSpan(version=2, start=1, end=9))
    mixed = with_first(groups, weight_versions=(*spans, WeightSpan(version=3, start=9, end=12)))
    report = update(learner, mixed)
    assert (report.parity.num_tokens, report.ratio.num_tokens) == (whole.num_tokens - 10, 10)  # one token is masked
    assert report.ratio.smallest < report.ratio.mean < report.ratio.largest
    assert 0 < report.parity.mean_abs < report.parity.max_abs
    assert (report.loss, report.kl_to_behaviour, report.num_tokens) == (
        whole.loss,
        whole.kl_to_behaviour,
        whole.num_tokens,
    )


def test_without_a_token_of_the_present_version_parity_says_nothing(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    learner = make_learner()
    update(learner, groups, step=0)
    report = update(learner, groups, step=1)  # the same groups again, a version later
    assert (report.parity.num_tokens, report.ratio.num_tokens) == (0, report.num_tokens)
    assert math.isnan(report.parity.bit_equal_fraction)
    assert math.isnan(report.parity.mean_abs)
    assert math.isnan(report.parity.max_abs)


def test_a_ratio_too_large_for_float32_does_no_harm_where_it_is_clipped(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    learner = make_learner()
    report = update(learner, with_first(groups, logprobs=(-300.0,) * 12))
    assert report.skipped is None
    assert math.isfinite(report.gradient_norm)


@pytest.mark.parametrize("preset", get_args(Preset))
def test_every_preset_updates(make_learner: MakeLearner, groups: list[TrajectoryGroup], preset: Preset) -> None:
    learner = make_learner(preset=preset)
    report = update(learner, groups)
    assert (report.skipped, report.kl_to_base) == (None, None)
    assert report.gradient_norm > 0


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_kl_to_the_base_pulls_the_policy_back(
    make_learner: MakeLearner, groups: list[TrajectoryGroup], placement: str
) -> None:
    def distance(coefficient: float) -> float | None:
        learner = make_learner(kl_coefficient=coefficient, kl_placement=placement, schedule="constant")
        return [update(learner, groups, step).kl_to_base for step in range(8)][-1]

    near, far = distance(10.0), distance(1e-9)
    assert near is not None
    assert far is not None
    assert near < far
    assert distance(0.0) is None


def test_an_entropy_bonus_raises_the_entropy(make_learner: MakeLearner, groups: list[TrajectoryGroup]) -> None:
    with_bonus, without = make_learner(entropy_coefficient=10.0), make_learner()
    for step in range(4):
        high, low = update(with_bonus, groups, step).entropy, update(without, groups, step).entropy
    assert high > low


def test_an_update_can_be_interrupted_while_the_base_is_scored(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    def units(**values: object) -> int:
        return len(list(make_learner(micro_batch_tokens=16, **values).update(groups, step=0, max_tokens=40)))

    assert units(kl_coefficient=0.1) - 1 == 2 * (units() - 1)


def test_groups_without_signal_change_nothing_not_even_by_momentum(
    make_learner: MakeLearner, make_group: MakeGroup, groups: list[TrajectoryGroup]
) -> None:
    learner = make_learner()
    update(learner, groups, step=0)
    before = learner.adapter
    report = update(learner, [make_group(5, (4, 6), (0.5, 0.5))], step=1)
    assert report.skipped == "the gradient is zero"
    assert learner.adapter is before


def test_no_groups_at_all_change_nothing(make_learner: MakeLearner) -> None:
    assert update(make_learner(), []).skipped == "no tokens with signal"


@pytest.mark.parametrize("rate", [0.0, 1e-30])
def test_an_update_that_moves_no_weight_makes_no_version_and_keeps_its_moments(
    make_learner: MakeLearner, groups: list[TrajectoryGroup], rate: float
) -> None:
    learner = make_learner(learning_rate=rate)
    before = learner.adapter
    for step in range(2):
        report = update(learner, groups, step)
        assert (report.skipped, report.has_moved, report.adapter_delta_norm) == (None, False, 0.0)
        assert report.version == before.version
        assert learner.adapter is before
        assert learner.optimizer_state()["b.step"].item() == step + 1
    assert learner.roll_back() is before


def test_an_update_tells_how_far_it_has_moved_the_adapter(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    learner = make_learner()
    before = learner.adapter.arrays
    report = update(learner, groups)
    after = learner.adapter.arrays
    old, moved = (np.concatenate([np.array(one[name]).ravel() for name in before]) for one in (before, after))
    assert report.has_moved
    assert report.adapter_norm == pytest.approx(np.linalg.norm(old), rel=1e-5)
    assert report.adapter_delta_norm == pytest.approx(np.linalg.norm(moved - old), rel=1e-3)
    assert report.adapter_delta_relative == pytest.approx(report.adapter_delta_norm / report.adapter_norm)


def test_updates_make_what_was_rewarded_more_likely(make_learner: MakeLearner, groups: list[TrajectoryGroup]) -> None:
    learner = make_learner()
    losses = [update(learner, groups, step).loss for step in range(6)]
    assert losses[-1] < losses[0]


def test_dropout_trains_and_follows_from_seed_and_step(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    def adapter_after(dropout: float, seed: int = 0, step: int = 1) -> str:
        learner = make_learner(dropout, seed)
        assert update(learner, groups, step).skipped is None
        assert learner.adapter.dropout == pytest.approx(dropout)
        return learner.adapter.digest

    same = adapter_after(0.2)
    assert adapter_after(0.2) == same
    assert len({same, adapter_after(0.0), adapter_after(0.2, seed=1), adapter_after(0.2, step=2)}) == 4


def test_a_restored_learner_goes_on_bit_for_bit(make_learner: MakeLearner, groups: list[TrajectoryGroup]) -> None:
    learner, restored = make_learner(), make_learner()
    for step in range(2):
        update(learner, groups, step)
    restored.restore(learner.adapter, learner.optimizer_state())
    for step in range(2, 4):
        update(learner, groups, step)
        update(restored, groups, step)
    assert learner.adapter.digest == restored.adapter.digest


def test_the_gradient_is_clipped_to_its_largest_norm(make_learner: MakeLearner, groups: list[TrajectoryGroup]) -> None:
    free, clipped = make_learner(max_gradient_norm=1e9), make_learner(max_gradient_norm=1e-3)
    assert update(free, groups).gradient_norm == update(clipped, groups).gradient_norm > 1e-3
    norms = [
        math.sqrt(sum(float((state[name] ** 2).sum().item()) for name in state if name.endswith(".m")))
        for state in (each.optimizer_state() for each in (free, clipped))
    ]
    assert norms[1] == pytest.approx(0.1 * 1e-3, rel=1e-4)  # the first moment after one step is (1 - 0.9) gradient
    assert norms[0] > norms[1]


def test_the_entropy_is_at_most_that_of_a_uniform_choice(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    assert 0 < update(make_learner(), groups).entropy <= math.log(385)


def test_arrays_of_an_adapter_are_float32(make_learner: MakeLearner, groups: list[TrajectoryGroup]) -> None:
    learner = make_learner()
    update(learner, groups)
    assert {array.dtype for array in learner.adapter.arrays.values()} == {mx.float32}


def test_an_update_hands_over_what_it_computed_of_the_completions_to_look_at(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    learner = make_learner(micro_batch_tokens=16)
    list(learner.update(groups, step=0, max_tokens=40, look=[0, 1, 4]))
    looked = {(one.group, one.index): one for one in learner.take_looked()}
    assert sorted(looked) == [(0, 0), (0, 1), (1, 1)]
    assert [len(looked[place].logprobs_T) for place in sorted(looked)] == [12, 3, 6]
    assert looked[1, 1].advantages_T.tolist() == pytest.approx([math.sqrt(0.5)] * 6, rel=1e-3)
    assert learner.take_looked() == []


def test_completions_that_were_left_out_do_not_shift_what_is_looked_at(
    make_learner: MakeLearner, groups: list[TrajectoryGroup]
) -> None:
    whole, partial_one = make_learner(), make_learner()
    list(whole.update(groups, step=0, max_tokens=40, look=range(5)))
    list(partial_one.update(with_first(groups, reward=math.inf), step=0, max_tokens=40, look=range(5)))
    before = {(one.group, one.index): one for one in whole.take_looked()}
    after = {(one.group, one.index): one for one in partial_one.take_looked()}
    assert sorted(before) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert sorted(after) == [(0, 1), (0, 2), (1, 0), (1, 1)]
    for place, one in after.items():
        np.testing.assert_allclose(one.logprobs_T, before[place].logprobs_T, rtol=1e-5)
        np.testing.assert_allclose(one.entropies_T, before[place].entropies_T, rtol=1e-4)


def test_looking_changes_no_bit_of_an_update(make_learner: MakeLearner, groups: list[TrajectoryGroup]) -> None:
    seen, unseen = make_learner(), make_learner()
    list(seen.update(groups, step=0, max_tokens=40, look=range(5)))
    update(unseen, groups)
    assert seen.adapter.digest == unseen.adapter.digest


def test_the_first_pass_is_built_while_the_weights_are_computed_that_all_read(
    make_learner: MakeLearner, groups: list[TrajectoryGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    built, queued = list[str](), list[str]()
    build, queue = Learner._round, LoraWeights.queue

    def noted_build(*arguments: Any) -> Any:
        built.append(threading.current_thread().name)
        return build(*arguments)

    def noted_queue(weights: LoraWeights) -> None:
        queued.append(threading.current_thread().name)
        queue(weights)

    monkeypatch.setattr(Learner, "_round", noted_build)
    monkeypatch.setattr(LoraWeights, "queue", noted_queue)
    update(make_learner(micro_batch_tokens=16), groups)
    assert len(built) > 1
    assert all(name.startswith("builder") for name in built)
    assert queued == [threading.current_thread().name]


def test_a_micro_batch_is_built_when_it_is_asked_for(groups: list[TrajectoryGroup]) -> None:
    batches = make_micro_batches(groups, resolve_objective(LearnerSettings()), max_tokens=40, budget=16)
    assert len(batches) > 2
    first = batches[0]
    assert list(batches._built) == [0]
    assert batches[0] is first
    assert batches[-1] is batches[len(batches) - 1]
    assert [batch is first for batch in batches] == [True] + [False] * (len(batches) - 1)


def test_an_error_of_a_micro_batch_is_not_taken_for_the_end_of_the_list() -> None:
    def fail() -> MicroBatch:
        raise IndexError("of what builds it")

    with pytest.raises(IndexError, match="builds"):
        list(PlannedBatches([fail]))
