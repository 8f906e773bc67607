import random
from collections.abc import Collection
from itertools import product
from statistics import fmean, median
from typing import Any

import pytest

from parallm.device.governor import Governor, Work

SECONDS: dict[Work, float] = {"serving": 0.01, "rollout": 0.03, "encoding": 0.05, "loading": 0.04, "learning": 0.2}


def shares(governor: Governor, ready: Collection[Work], units: int = 10_000) -> dict[Work, float]:
    """Fractions of the device seconds that `units` units of uneven lengths give to each kind of work."""
    lengths = random.Random(5)
    before = dict(governor.seconds)
    for _ in range(units):
        work = governor.choose(ready)
        governor.charge(work, SECONDS[work] * lengths.uniform(0.2, 1.8))
    spent = {work: governor.seconds[work] - before[work] for work in governor.seconds}
    return {work: seconds / sum(spent.values()) for work, seconds in spent.items()}


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        (["serving", "rollout"], {"serving": 0.7, "rollout": 0.3}),
        (["serving", "learning"], {"serving": 0.4, "learning": 0.6}),
        (["serving", "rollout", "learning"], {"serving": 0.28, "rollout": 0.12, "learning": 0.6}),
        (["serving", "encoding"], {"serving": 0.7, "encoding": 0.3}),
        (["serving", "rollout", "encoding"], {"serving": 0.7, "rollout": 0.15, "encoding": 0.15}),
        (["encoding", "learning"], {"encoding": 0.4, "learning": 0.6}),
        (["serving", "loading"], {"serving": 0.875, "loading": 0.125}),
        (["loading", "learning"], {"loading": 0.4, "learning": 0.6}),
        (
            ["serving", "rollout", "encoding", "learning"],
            {"serving": 0.28, "rollout": 0.06, "encoding": 0.06, "learning": 0.6},
        ),
    ],
)
def test_those_who_want_the_device_get_their_shares_within_two_points(
    ready: list[Work], expected: dict[Work, float]
) -> None:
    expected = {work: expected.get(work, 0.0) for work in SECONDS}
    assert shares(Governor(serving_share=0.7, engine_share=0.4), ready) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("work", ["serving", "rollout", "encoding", "loading", "learning"])
def test_one_alone_gets_everything(work: Work) -> None:
    assert shares(Governor(serving_share=0.7, engine_share=0.4), [work], units=10)[work] == 1.0


def test_the_learner_goes_first_while_nobody_is_served() -> None:
    assert shares(Governor(serving_share=0.7, engine_share=0.4), ["rollout", "learning"], units=100)["learning"] == 1.0


@pytest.mark.parametrize("alone", [["serving"], ["rollout"], ["learning"], ["rollout", "learning"]])
def test_time_spent_alone_is_not_held_against_anybody_later(alone: list[Work]) -> None:
    governor = Governor(serving_share=0.7, engine_share=0.4)
    shares(governor, ["serving", "rollout", "learning"], units=100)
    shares(governor, alone, units=1000)
    after = shares(governor, ["serving", "rollout", "learning"], units=500)
    assert after == pytest.approx(
        {"serving": 0.28, "rollout": 0.12, "encoding": 0, "loading": 0, "learning": 0.6}, abs=0.05
    )


def test_work_that_comes_and_goes_does_not_save_up_turns() -> None:
    governor = Governor(serving_share=0.5, engine_share=0.5)
    shares(governor, ["rollout"], units=1000)
    chosen = []
    for _ in range(8):
        work = governor.choose(["serving", "rollout"])
        governor.charge(work, 1.0)
        chosen.append(work)
    assert chosen.count("serving") == 4


def test_a_share_of_zero_waits_until_the_others_are_idle() -> None:
    governor = Governor(serving_share=1.0, engine_share=0.4)
    assert shares(governor, ["serving", "rollout"], units=1000)["rollout"] < 0.01
    assert shares(governor, ["rollout"], units=10)["rollout"] == 1.0


def test_shares_can_change_while_work_goes_on() -> None:
    governor = Governor(serving_share=0.9, engine_share=0.4)
    shares(governor, ["serving", "rollout"], units=1000)
    governor.serving_share = 0.2
    assert shares(governor, ["serving", "rollout"])["serving"] == pytest.approx(0.2, abs=0.02)


def intervals(target: float | None, other_seconds: float, switch_seconds: float, ready: list[Work]) -> list[float]:
    """Times between units of serving, in multiples of the mean unit without other work."""
    governor = Governor(serving_share=0.7, engine_share=0.4, serving_latency_target=target)
    lengths, times, last = random.Random(5), [0.0], "serving"
    for _ in range(20_000):
        work = governor.choose(ready)
        if work != "serving" and last == "serving":
            governor.charge("serving", 1e-6, is_flush=True)
        seconds = (0.01 if work == "serving" else other_seconds) * lengths.uniform(0.8, 1.2)
        seconds += switch_seconds if work == "serving" and last != "serving" else 0.0
        governor.charge(work, seconds)
        times[-1] += seconds / 0.01
        if work == "serving":
            times.append(0.0)
        last = work
    return times[100:-1]


def targets() -> list[Any]:
    """Targets, seconds of other units and of a switch, and the work that is ready: in every check a third of them,
    with each value of each."""
    ready = (
        ["serving", "learning"],
        ["serving", "rollout"],
        ["serving", "rollout", "learning"],
        ["serving", "encoding", "learning"],
    )
    others = (0.0003, 0.001, 0.003, 0.005, 0.02, 0.2)
    return [
        pytest.param(*case, marks=() if sum(places) % 3 == 0 else pytest.mark.slow)
        for places, case in zip(
            product(range(3), range(6), range(2), range(4)),
            product((1.05, 1.2, 2.0), others, (0.0, 0.002), ready),
            strict=True,
        )
    ]


@pytest.mark.parametrize(("target", "other_seconds", "switch_seconds", "ready"), targets())
def test_the_time_between_tokens_stays_within_its_target(
    target: float, other_seconds: float, switch_seconds: float, ready: list[Work]
) -> None:
    times = intervals(target, other_seconds, switch_seconds, ready)
    assert fmean(times) <= target * 1.02
    assert median(times) <= target * 1.02


@pytest.mark.parametrize("other_seconds", [0.0003, 0.02])
def test_shares_alone_hold_no_target(other_seconds: float) -> None:
    times = intervals(None, other_seconds, 0.0, ["serving", "learning"])
    assert fmean(times) > 2.4
    assert median(times) > 2.4


def test_other_work_gets_what_the_target_leaves() -> None:
    governor = Governor(serving_share=0.7, engine_share=0.4, serving_latency_target=1.2)
    assert shares(governor, ["serving", "learning"])["learning"] == pytest.approx(0.2 / 1.2, abs=0.01)
    assert shares(governor, ["rollout", "learning"], units=100)["learning"] == 1.0
    with_vectors = shares(governor, ["serving", "encoding", "learning"], units=40_000)
    assert with_vectors["encoding"] + with_vectors["learning"] == pytest.approx(0.2 / 1.2, abs=0.01)
    assert with_vectors["encoding"] == pytest.approx(with_vectors["learning"], abs=0.01)
    shares(governor, ["encoding"], units=1000)
    after = shares(governor, ["serving", "encoding", "learning"], units=40_000)
    assert after["encoding"] == pytest.approx(with_vectors["encoding"], abs=0.01)
    governor.serving_latency_target = None
    assert shares(governor, ["serving", "learning"])["learning"] == pytest.approx(0.6, abs=0.02)


def test_a_target_that_is_set_while_work_runs_holds_from_then_on() -> None:
    governor = Governor(serving_share=0.7, engine_share=0.4)
    shares(governor, ["serving", "learning"], units=10_000)
    governor.serving_latency_target = 1.2
    assert shares(governor, ["serving", "learning"], units=2000)["learning"] == pytest.approx(0.2 / 1.2, abs=0.02)


def test_serving_that_begins_goes_first() -> None:
    governor = Governor(serving_share=0.7, engine_share=0.4, serving_latency_target=1.2)
    shares(governor, ["serving", "learning"], units=100)
    shares(governor, ["learning"], units=10)
    assert governor.choose(["serving", "learning"]) == "serving"
