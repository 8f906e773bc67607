"""Updates in shares: the gradient of several workers is that of one, and with `exact` bit for bit."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any, get_args

import numpy as np
import pytest

from parallm.device.streams import DeviceStreams
from parallm.distributed.exchange import Alone
from parallm.distributed.learner import SharedLearner
from parallm.learner.learner import Learner
from parallm.learner.settings import Advantage, LearnerSettings, Preset
from parallm.model.shared_model import SharedModel
from parallm.reports import UpdateReport
from parallm.types import TrajectoryGroup
from tests.distributed.conftest import Together
from tests.learner.conftest import build_group, build_start

GROUPS = [
    build_group(1, (12, 3, 1), (1.0, 0.0, 0.5)),
    build_group(2, (5, 6), (0.0, 1.0)),
    build_group(3, (9, 9, 2, 4), (1.0, 1.0, 0.0, 0.2), prompt_length=30),
]
MANY = [build_group(seed, (12, 3, 7), (1.0, 0.0, 0.5)) for seed in range(12)]
Update = tuple[UpdateReport, SharedLearner | Learner]
RunTogether = Callable[..., list[Update]]


@pytest.fixture
def together(load_tiny: Callable[[str], SharedModel], streams: DeviceStreams) -> RunTogether:
    """The report and the learner of each rank after one update; without `size`, of a plain learner."""

    def run(
        size: int | None,
        groups: Sequence[TrajectoryGroup] = GROUPS,
        *,
        exact: bool = False,
        dropout: float = 0.0,
        **values: Any,
    ) -> list[Update]:
        model = load_tiny("qwen3")
        settings = LearnerSettings(
            **{"warmup_steps": 0, "learning_rate": 1e-3, "micro_batch_tokens": 40, "max_gradient_norm": 1e9} | values
        )
        start = build_start(model, dropout=dropout)
        if size is None:
            learners = [Learner(model, streams, settings, start=start, total_steps=10, seed=0)]
        else:
            group = Together(size, exact=exact)
            exchanges = [Alone()] if size == 1 else [group.rank(rank) for rank in range(size)]
            learners = [
                SharedLearner(
                    model, streams, settings, exchange=one, exact=exact, slots=4, start=start, total_steps=10, seed=0
                )
                for one in exchanges
            ]
        reports = side_by_side([learner.update(groups, step=0, max_tokens=40) for learner in learners])
        return list(zip(reports, learners, strict=True))

    return run


def side_by_side(updates: Sequence[Iterator[Any]]) -> list[UpdateReport]:
    """Run each update up to its next exchange, in turns; return their reports."""
    reports: dict[int, UpdateReport] = {}
    while len(reports) < len(updates):
        for rank, update in enumerate(updates):
            for value in update:
                if isinstance(value, UpdateReport):
                    reports[rank] = value
                if isinstance(value, Future):
                    break
    return [reports[rank] for rank in range(len(updates))]


def comparable(report: UpdateReport) -> UpdateReport:
    return replace(report, seconds=0.0)


def gradient(learner: Learner) -> np.ndarray:
    """The gradient of a first update, times a constant: the first moments that it has made."""
    state = learner.optimizer_state()
    return np.concatenate([np.array(state[f"{group}.all.m"]) for group in ("b", "others")])


@pytest.mark.parametrize("size", [2, 3])
def test_workers_that_share_an_update_make_the_same_version_and_report(size: int, together: RunTogether) -> None:
    updates = together(size, dropout=0.1)
    assert len({learner.adapter.digest for _, learner in updates}) == 1
    assert len({gradient(learner).tobytes() for _, learner in updates}) == 1
    assert len({repr(comparable(report)) for report, _ in updates}) == 1
    assert updates[0][0].skipped is None


@pytest.mark.parametrize("preset", [name for name in get_args(Preset) if name != "sft"])
def test_the_gradient_of_two_workers_is_that_of_one(preset: Preset, together: RunTogether) -> None:
    ((report, one),), ((shared, two), _) = together(None, preset=preset), together(2, preset=preset)
    assert np.linalg.norm(gradient(one) - gradient(two)) < 1e-6 * np.linalg.norm(gradient(one))
    assert shared.loss == pytest.approx(report.loss, rel=1e-5, abs=1e-6)
    assert (shared.num_tokens, shared.skipped) == (report.num_tokens, report.skipped)
    for name in ("entropy", "kl_to_behaviour", "clip_fraction"):
        assert getattr(shared, name) == pytest.approx(getattr(report, name), rel=1e-4, abs=1e-6), name
    assert (shared.kl_to_base or 0) == pytest.approx(report.kl_to_base or 0, rel=1e-4, abs=1e-6)
    for ours, theirs in ((report.parity, shared.parity), (report.ratio, shared.ratio)):
        assert asdict(theirs) == pytest.approx(asdict(ours), rel=1e-4, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    "values",
    [
        *(
            pytest.param({"advantage": name}, marks=() if name == get_args(Advantage)[0] else pytest.mark.slow)
            for name in get_args(Advantage)
        ),
        {"kl_coefficient": 0.1, "kl_placement": "loss", "kl_to": "base"},
        {"kl_coefficient": 0.1, "kl_placement": "reward", "kl_to": "base"},
        {"top_entropy_fraction": 0.5},
    ],
    ids=str,
)
def test_exact_sums_do_not_depend_on_the_number_of_workers(values: dict[str, Any], together: RunTogether) -> None:
    one, two, three = (together(size, MANY, exact=True, dropout=0.1, **values)[-1] for size in (1, 2, 3))
    assert one[1].adapter.digest == two[1].adapter.digest == three[1].adapter.digest
    assert gradient(one[1]).tobytes() == gradient(two[1]).tobytes() == gradient(three[1]).tobytes()
    assert repr(comparable(one[0])) == repr(comparable(two[0])) == repr(comparable(three[0]))


def test_plain_sums_depend_on_the_number_of_workers(together: RunTogether) -> None:
    """The control of the test above: rounding differs, so equal bits are no matter of course."""
    one, three = (gradient(together(size, MANY)[0][1]) for size in (1, 3))
    assert 0 < np.linalg.norm(one - three) < 1e-5 * np.linalg.norm(one)


def test_a_worker_without_a_round_takes_part(together: RunTogether) -> None:
    single = [build_group(5, (4, 4), (0.0, 1.0))]
    updates = together(4, single, micro_batch_tokens=1024)
    assert len({learner.adapter.digest for _, learner in updates}) == 1
    assert updates[0][1].adapter.version == 4


@pytest.mark.parametrize("exact", [False, True])
def test_a_fault_on_one_worker_skips_the_step_on_all(exact: bool, together: RunTogether) -> None:
    first, *others = GROUPS
    broken = replace(first.trajectories[1], logprobs=(-200.0,) * 3)
    groups = [replace(first, trajectories=(first.trajectories[0], broken, first.trajectories[2])), *others]
    updates = together(2, groups, exact=exact)
    reports = [comparable(report) for report, _ in updates]
    assert repr(reports[0]) == repr(reports[1])
    assert reports[0].fault is not None
    assert {culprit.index for culprit in reports[0].culprits} == {1}
    assert [learner.adapter.version for _, learner in updates] == [3, 3]


def test_nothing_to_learn_is_known_to_all(together: RunTogether) -> None:
    updates = together(2, [build_group(6, (3, 3), (1.0, 1.0))])
    assert all(report.skipped for report, _ in updates)
    assert [learner.adapter.version for _, learner in updates] == [3, 3]
