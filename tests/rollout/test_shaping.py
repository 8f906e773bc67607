import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from parallm.rollout.collector import Collector, RolloutBatch
from parallm.rollout.scoring import overlong_part
from parallm.types import Completion, FinishReason, GenerationRequest
from tests.rollout.answers import one_by_one


@pytest.mark.parametrize(
    ("length", "part"), [(0, 0.0), (60, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (99, -0.95), (100, -1.0)]
)
def test_the_overlong_part_falls_in_a_line_over_the_buffer(length: int, part: float) -> None:
    assert overlong_part(length, max_tokens=100, buffer=20) == pytest.approx(part)


def collect(collector: Collector, engine: Any) -> RolloutBatch:
    """With completions of 2, 5, 8 and 9 tokens of at most 9, of which the last is cut off."""

    async def generate_all(requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        return [[grown(one) for one in row] for row in await engine.generate_all(requests)]

    def grown(one: Completion) -> Completion:
        length = (2, 5, 8, 9)[one.index]
        reason: FinishReason = "length" if length == 9 else "stop"
        return replace(one, tokens=(7,) * length, logprobs=(-0.5,) * length, finish_reason=reason)

    collector._runner._generate = one_by_one(generate_all)
    return asyncio.run(collector.collect(0, "policy"))


def test_long_completions_lose_reward_where_the_buffer_is_on(
    make_collector: Callable[..., Collector], engine: Any
) -> None:
    collector = make_collector("2", problems_per_step=1, refill_rounds=0, overlong_buffer=4, overlong_weight=0.5)
    (group,) = collect(collector, engine).sampled
    assert group.rewards == (1.0, 1.0, 0.25 - 0.5 * 0.75, 0.25 - 0.5)
    assert group.trajectories[2].reward_parts == {
        "correct": 0.0,
        "format": 1.0,
        "seen": 5.0,
        "rollout/overlong": -0.75,
    }


def test_right_answers_pay_for_their_length_and_wrong_ones_do_not(
    make_collector: Callable[..., Collector], engine: Any
) -> None:
    collector = make_collector("2", problems_per_step=1, refill_rounds=0, length_weight=0.9)
    (group,) = collect(collector, engine).sampled
    assert group.rewards == pytest.approx((1.0 - 0.2, 1.0 - 0.5, 0.25, 0.25))
    assert [one.reward_parts["rollout/length"] for one in group.trajectories] == [-2 / 9, -5 / 9, 0.0, 0.0]


def test_a_group_without_a_right_answer_learns_nothing_about_length(
    make_collector: Callable[..., Collector], engine: Any
) -> None:
    collector = make_collector("0", problems_per_step=1, refill_rounds=0, length_weight=0.9)
    assert collect(collector, engine).with_signal == ()


def test_cut_off_completions_count_in_the_mean_and_not_in_the_gradient(
    make_collector: Callable[..., Collector], engine: Any
) -> None:
    collector = make_collector("2", problems_per_step=1, refill_rounds=0, mask_truncated=True)
    (group,) = collect(collector, engine).sampled
    assert [sum(one.loss_mask) for one in group.trajectories] == [2, 5, 8, 0]
    assert group.rewards == (1.0, 1.0, 0.25, 0.25)


def test_without_settings_nothing_is_shaped(make_collector: Callable[..., Collector], engine: Any) -> None:
    (group,) = collect(make_collector("2", problems_per_step=1, refill_rounds=0), engine).sampled
    assert group.rewards == (1.0, 1.0, 0.25, 0.25)
    assert [sum(one.loss_mask) for one in group.trajectories] == [2, 5, 8, 9]
