"""Verdicts on made-up steps: when a run goes on, rolls back and stops."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from parallm.metrics.step import StepMetrics
from parallm.reports import FaultKind, ParityReport, RatioReport, UpdateReport
from parallm.trainer.guard import Guard, Verdict
from parallm.trainer.settings import GuardSettings
from parallm.types import Message, Problem, Trajectory, TrajectoryGroup

UPDATE = UpdateReport(
    step=1,
    version=1,
    loss=0.02,
    gradient_norm=0.5,
    learning_rate=1e-4,
    clip_fraction=0.0,
    kl_to_behaviour=0.0,
    entropy=0.5,
    num_tokens=800,
    seconds=1.5,
    parity=ParityReport(num_tokens=800, bit_equal_fraction=1.0, mean_abs=0.0, max_abs=0.0),
    ratio=RatioReport(num_tokens=0, mean=math.nan, smallest=math.nan, largest=math.nan),
)
STEP = StepMetrics(
    step=1,
    reward_mean=0.5,
    reward_std=0.4,
    groups_sampled=20,
    groups_with_signal=16,
    completion_length_mean=64.0,
    truncated_fraction=0.0,
    rollout_tokens=1000,
    rollout_seconds=2.0,
    update_seconds=1.75,
    total_seconds=4.0,
    rollout_tokens_per_second=500.0,
    serving_tokens_per_second=30.0,
    update=UPDATE,
)


def faulty(kind: FaultKind) -> StepMetrics:
    return replace(STEP, update=replace(UPDATE, skipped=f"a {kind} is not finite", fault=kind))


def step(*, parity: float = 0.0, reward: float = 0.5, **update: Any) -> StepMetrics:
    report = replace(UPDATE.parity, mean_abs=parity)
    return replace(STEP, reward_mean=reward, update=replace(UPDATE, parity=report, **update))


def judged(guard: Guard, steps: Sequence[StepMetrics]) -> list[Verdict]:
    return [guard.judge(each, ()) for each in steps]


def actions(guard: Guard, steps: Sequence[StepMetrics]) -> list[str]:
    return [verdict.action for verdict in judged(guard, steps)]


def make_guard(*, compares: bool = True, **values: Any) -> Guard:
    return Guard(GuardSettings(**values), compares=compares)


def test_three_faults_in_a_row_roll_back_and_after_two_roll_backs_training_stops() -> None:
    guard = make_guard()
    verdicts = judged(guard, [faulty("behaviour")] * 9)
    assert [verdict.action for verdict in verdicts] == ["skip", "skip", "roll_back"] * 2 + ["skip", "skip", "stop"]
    assert verdicts[0].reason == "nothing was changed: a behaviour is not finite"
    assert verdicts[8].reason.startswith("3 steps in a row changed nothing, the last one because a behaviour is not")
    assert "2 roll-backs have not helped" in verdicts[8].reason


def test_rewards_that_cannot_be_learned_from_never_roll_back_and_never_stop() -> None:
    guard = make_guard()
    assert actions(guard, [faulty("reward")] * 20) == ["skip"] * 20
    assert actions(guard, [faulty("loss"), faulty("reward"), faulty("loss"), faulty("loss")])[-1] == "roll_back"
    assert guard.row()["guard/skipped_reward"] == 21


def test_a_good_update_between_faults_starts_the_count_anew() -> None:
    assert actions(make_guard(), [faulty("loss"), faulty("loss"), STEP] * 3) == ["skip", "skip", "go_on"] * 3


def test_a_step_without_signal_neither_counts_as_a_fault_nor_forgives_one() -> None:
    idle = replace(STEP, update=None)
    guard = make_guard()
    assert actions(guard, [faulty("loss"), faulty("loss"), idle, faulty("loss")])[2:] == ["go_on", "roll_back"]
    assert actions(make_guard(), [idle] * 9) == ["go_on"] * 9


def test_roll_backs_are_counted_over_the_whole_run() -> None:
    guard = make_guard(max_skips=1, max_rollbacks=1)
    assert actions(guard, [faulty("gradient"), STEP, STEP, faulty("gradient")]) == [
        "roll_back", "go_on", "go_on", "stop",
    ]  # fmt: skip


def test_the_counts_are_metrics_by_kind() -> None:
    guard = make_guard()
    judged(guard, [faulty("loss"), faulty("logprob"), faulty("loss"), replace(STEP, update=None)])
    assert guard.row() == {
        "guard/skipped": 3,
        "guard/rollbacks": 1,
        "guard/idle": 1,
        "guard/empty_completions": 0,
        "guard/skipped_logprob": 1,
        "guard/skipped_loss": 2,
    }


def test_equal_rewards_and_a_zero_gradient_are_named_once_and_counted_each_time() -> None:
    guard = make_guard()
    verdicts = judged(guard, [replace(STEP, update=None)] * 3 + [STEP, step(skipped="the gradient is zero")])
    assert [verdict.warnings for verdict in verdicts] == [
        ("nothing was trained: every completion of a problem got the same reward",),
        (),
        (),
        (),
        ("nothing was trained: the gradient is zero",),
    ]
    assert guard.row()["guard/idle"] == 4


def test_updates_that_move_nothing_are_named_once_in_a_row_with_their_learning_rate() -> None:
    off, fine = step(has_moved=False, learning_rate=0.0), step(has_moved=False, learning_rate=1e-12)
    guard = make_guard()
    verdicts = judged(guard, [off, off, STEP])
    resumed = make_guard()
    resumed.resume(json.loads(json.dumps(guard.counters())))
    verdicts += judged(resumed, [fine, faulty("loss"), fine])
    assert [verdict.warnings for verdict in verdicts] == [
        ("the update has moved no weight at learner.learning_rate=0: no new version",),
        (),
        (),
        (
            "the update has moved no weight at learner.learning_rate=1e-12, since its step is too small for float32 "
            "beside the weights: no new version",
        ),
        (),
        (),
    ]


def test_completions_without_a_token_are_named_and_counted() -> None:
    empty = Trajectory(
        problem_id="p7",
        prompt_tokens=(1, 2),
        tokens=(),
        loss_mask=(),
        logprobs=(),
        temperature=1.0,
        weight_versions=(),
        reward_parts={},
        reward=0.0,
        text="",
        finish_reason="abort",
    )
    problem = Problem(problem_id="p7", messages=(Message(role="user", content="?"),), answer="")
    full = replace(empty, tokens=(3,), loss_mask=(True,), logprobs=(-1.0,))
    guard = make_guard()
    verdict = guard.judge(STEP, [TrajectoryGroup(problem=problem, trajectories=(full, empty, empty))])
    assert verdict == Verdict(action="go_on", warnings=("2 completions have no token, the first one of problem p7",))
    assert guard.row()["guard/empty_completions"] == 2


def test_a_healthy_run_of_a_sure_and_right_policy_is_left_alone() -> None:
    """The entropy falls from 0.06 to 0.03 and then to almost nothing while the reward rises."""
    rising = [step(entropy=0.06 - 0.001 * place, reward=0.35 + 0.01 * place) for place in range(30)]
    guard = make_guard()
    verdicts = judged(guard, rising)
    assert {(verdict.action, verdict.warnings) for verdict in verdicts} == {("go_on", ())}
    solved = [replace(step(entropy=0.001, reward=0.99), groups_with_signal=0, groups_sampled=64)] * 80
    verdicts = judged(guard, solved)
    assert {verdict.action for verdict in verdicts} == {"go_on"}
    warnings = [text for verdict in verdicts for text in verdict.warnings]
    assert len(warnings) == 2
    assert warnings[0].startswith("the entropy is 0.001 a token, at the start it was 0.058")
    assert warnings[1].startswith("over the last 50 steps")


@pytest.mark.parametrize(("entropy", "says"), [(0.001, "hardly different"), (2.0, "loses what it knew")])
def test_an_entropy_out_of_bounds_stops_a_run_whose_reward_has_fallen_too(entropy: float, says: str) -> None:
    guard = make_guard()
    judged(guard, [step(reward=0.6)] * 10)
    verdicts = judged(guard, [step(entropy=entropy, reward=0.1)] * 7)
    assert [verdict.action for verdict in verdicts[:4]] == ["go_on"] * 4
    stopped = next(verdict for verdict in verdicts if verdict.action == "stop")
    assert stopped.reason.startswith("training diverges: the entropy is")
    assert says in stopped.reason


def test_an_entropy_that_is_not_finite_is_nothing_to_compare_with() -> None:
    guard = make_guard()
    assert set(actions(guard, [step(entropy=math.nan)] * 3 + [step(entropy=math.inf)])) == {"go_on"}
    judged(guard, [step(entropy=0.5, reward=0.6)] * 10)
    assert "stop" in actions(guard, [step(entropy=2.0, reward=0.1)] * 7)
    assert guard.counters()["divergence"]["start_entropies"] == [0.5] * 5


def test_a_reward_that_falls_by_no_more_than_noise_is_no_divergence() -> None:
    guard = make_guard()
    judged(guard, [step(reward=0.6)] * 10)
    assert set(actions(guard, [step(entropy=0.001, reward=0.45)] * 20)) == {"go_on"}


def test_a_kl_above_its_limit_stops_after_five_updates_in_a_row() -> None:
    far = step(kl_to_behaviour=0.06)
    guard = make_guard(compares=False)
    assert actions(guard, [far] * 4 + [STEP] + [far] * 5) == ["go_on"] * 9 + ["stop"]
    assert set(actions(make_guard(compares=False, max_kl=0.1), [far] * 9)) == {"go_on"}


def test_log_probs_that_differ_are_said_once_and_stop_when_they_differ_too_much() -> None:
    (by_k3,) = judged(make_guard(), [step(kl_to_behaviour=0.002)])
    assert len(by_k3.warnings) == 1
    guard = make_guard()
    verdicts = judged(guard, [step(parity=0.006)] * 3)
    assert [len(verdict.warnings) for verdict in verdicts] == [1, 0, 0]
    assert "log-probs of engine and learner differ by 0.006" in verdicts[0].warnings[0]
    (stopped,) = judged(guard, [step(parity=0.06)])
    assert stopped.action == "stop"
    assert "Try model.dtype=float32" in stopped.reason


@pytest.mark.parametrize("compares", [False, True])
def test_log_probs_are_compared_where_engine_and_learner_compute_the_same(compares: bool) -> None:
    (verdict,) = judged(make_guard(compares=compares), [step(parity=0.06)])
    assert verdict.action == ("stop" if compares else "go_on")


def test_log_probs_of_older_versions_are_not_compared() -> None:
    nothing = ParityReport(num_tokens=0, bit_equal_fraction=math.nan, mean_abs=math.nan, max_abs=math.nan)
    old = replace(STEP, update=replace(UPDATE, parity=nothing, kl_to_behaviour=0.02))
    assert judged(make_guard(), [old] * 9) == [Verdict(action="go_on")] * 9


def test_hardly_any_signal_stops_a_run_whose_reward_has_fallen() -> None:
    guard = make_guard()
    judged(guard, [step(reward=0.6)] * 10)
    silent = replace(step(reward=0.0), groups_with_signal=0)
    verdicts = judged(guard, [silent] * 49)
    assert [verdict.action for verdict in verdicts] == ["go_on"] * 48 + ["stop"]
    assert "hardly anything to learn" in verdicts[-1].reason


def test_where_divergence_only_warns_each_sign_is_said_once() -> None:
    guard = make_guard(on_divergence="warn")
    verdicts = judged(guard, [step(kl_to_behaviour=0.2, parity=0.3)] * 9)
    assert {verdict.action for verdict in verdicts} == {"go_on"}
    assert sum(len(verdict.warnings) for verdict in verdicts) == 2


def test_a_skipped_step_says_nothing_about_the_policy() -> None:
    nothing = replace(faulty("reward"), reward_mean=math.nan, reward_std=math.nan)
    broken = replace(nothing, update=replace(UPDATE, skipped="x", fault="reward", entropy=math.nan))
    guard = make_guard(max_skips=100)
    assert {verdict.warnings for verdict in judged(guard, [broken] * 9)} == {()}


def test_a_resumed_guard_judges_like_one_that_was_never_interrupted() -> None:
    steps = [step(reward=0.6)] * 10 + [faulty("reward"), step(kl_to_behaviour=0.06), faulty("loss")]
    rest = [step(entropy=0.001, reward=0.1)] * 4 + [faulty("loss")] * 2 + [step(entropy=0.001, reward=0.1)] * 9
    whole, first, second = make_guard(), make_guard(), make_guard()
    judged(whole, steps)
    judged(first, steps)
    second.resume(json.loads(json.dumps(first.counters())))
    assert judged(second, rest) == judged(whole, rest)
    assert second.row() == whole.row()
    assert second.counters() == whole.counters()
