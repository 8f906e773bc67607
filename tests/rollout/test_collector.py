import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from parallm.errors import ContextTooLong
from parallm.rollout.collector import Collector, RolloutBatch
from parallm.types import Completion, GenerationRequest, WeightSpan
from tests.rollout.answers import one_by_one


def collect(collector: Collector, step: int = 0) -> RolloutBatch:
    return asyncio.run(collector.collect(step, "policy"))


def test_a_step_has_one_group_of_trajectories_per_problem(make_collector: Callable[..., Collector]) -> None:
    collection = collect(make_collector("1", "2", "3", problems_per_step=3))
    assert [len(group.trajectories) for group in collection.first] == [4, 4, 4]
    assert sorted(group.problem.problem_id for group in collection.first) == ["p0", "p1", "p2"]
    assert collection.num_tokens == 24


def test_a_trajectory_holds_exactly_what_was_sampled(make_collector: Callable[..., Collector]) -> None:
    one = collect(make_collector("1", problems_per_step=1)).first[0].trajectories[2]
    assert (one.prompt_tokens, one.tokens, one.logprobs) == ((120,), (7, 2), (-0.5, -0.25))
    assert (one.loss_mask, one.temperature, one.text) == ((True, True), 0.5, "2")
    assert one.weight_versions == (WeightSpan(version=3, start=0, end=2),)


def test_the_reward_is_the_weighted_sum_of_the_parts(make_collector: Callable[..., Collector]) -> None:
    group = collect(make_collector("1", problems_per_step=1)).first[0]
    assert group.rewards == (1.0, 0.25, 0.25, 0.25)
    assert group.trajectories[0].reward_parts == {"correct": 1.0, "format": 1.0, "seen": 5.0}


def test_rollouts_use_the_policy_itself_at_the_temperature_of_the_settings(
    make_collector: Callable[..., Collector], engine: Any
) -> None:
    collect(make_collector("1", problems_per_step=1))
    (request,) = engine.rounds[0]
    assert (request.traffic, request.model, request.n) == ("rollout", "policy", 4)
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.5, 9)
    assert (request.sampling.top_p, request.sampling.top_k, request.sampling.min_p) == (1.0, 0, 0.0)


@pytest.mark.parametrize("switches", [False, True])
def test_rollouts_follow_new_versions_if_asked_to(
    make_collector: Callable[..., Collector], engine: Any, switches: bool
) -> None:
    collect(make_collector("1", problems_per_step=1, switch_in_flight=switches))
    assert engine.rounds[0][0].switches_in_flight is switches


def test_groups_without_signal_are_replaced(make_collector: Callable[..., Collector], engine: Any) -> None:
    collection = collect(make_collector("0", "4", "1", "2", problems_per_step=4, refill_rounds=1, refill_below=1))
    assert [len(requests) for requests in engine.rounds] == [4, 2]
    assert (len(collection.first), len(collection.sampled)) == (4, 6)
    assert all(0 < sum(reward == 1 for reward in group.rewards) < 4 for group in collection.with_signal)


@pytest.mark.parametrize(("below", "rounds"), [(0.5, [4]), (0.51, [4, 2]), (1, [4, 2]), (0, [4])])
def test_groups_are_replaced_only_where_too_small_a_share_has_signal(
    below: float, rounds: list[int], make_collector: Callable[..., Collector], engine: Any
) -> None:
    collect(make_collector("0", "4", "1", "2", problems_per_step=4, refill_rounds=1, refill_below=below))
    assert [len(requests) for requests in engine.rounds] == rounds


def test_replacing_ends_when_enough_groups_have_signal(make_collector: Callable[..., Collector], engine: Any) -> None:
    collect(make_collector("1", "2", "3", problems_per_step=3, refill_rounds=3))
    assert len(engine.rounds) == 1


def test_replacing_ends_after_the_rounds_of_the_settings(make_collector: Callable[..., Collector], engine: Any) -> None:
    collection = collect(make_collector("0", "4", problems_per_step=2, refill_rounds=3))
    assert [len(requests) for requests in engine.rounds] == [2, 2, 2, 2]
    assert collection.with_signal == ()


def test_no_replacing_at_all_is_possible(make_collector: Callable[..., Collector], engine: Any) -> None:
    collect(make_collector("0", "4", problems_per_step=2, refill_rounds=0))
    assert len(engine.rounds) == 1


def test_replacements_have_request_ids_and_seeds_of_their_own(
    make_collector: Callable[..., Collector], engine: Any
) -> None:
    collect(make_collector("0", "4", problems_per_step=2, refill_rounds=3))
    requests = [request for requests in engine.rounds for request in requests]
    assert len({request.request_id for request in requests}) == 8
    assert len({request.sampling.seed for request in requests}) == 8


def test_the_same_seed_step_and_cursor_ask_for_the_same(make_collector: Callable[..., Collector], engine: Any) -> None:
    collect(make_collector("1", "2", "3", problems_per_step=2, seed=5, cursor=4), step=7)
    collect(make_collector("1", "2", "3", problems_per_step=2, seed=5, cursor=4), step=7)
    collect(make_collector("1", "2", "3", problems_per_step=2, seed=5, cursor=4), step=8)
    first, second, third = engine.rounds
    assert first == second
    assert {one.sampling.seed for one in first}.isdisjoint(one.sampling.seed for one in third)


def test_a_prompt_longer_than_the_context_names_its_problem(make_collector: Callable[..., Collector]) -> None:
    async def refuse(_: Sequence[GenerationRequest]) -> list[list[Completion]]:
        raise ContextTooLong("the prompt has 3 tokens and max_tokens is 9; together the limit is 8", "max_tokens")

    collector = make_collector("1", "2", "3", problems_per_step=3)
    collector._runner._generate = one_by_one(refuse)
    with pytest.raises(ContextTooLong, match=r"problem p2: the prompt has 3 tokens .* limit is 8"):
        collect(collector)
