"""Each trap of run-api and its environments, as it shows from outside, is named with a way out."""

import dataclasses
from typing import Any

import pytest

from parallm.integrations.atropos.api import ApiStatus, Sizes
from parallm.integrations.atropos.diagnosis import EnvironmentFacts, Observed, causes_of
from parallm.integrations.atropos.source import AtroposFacts, Wait
from parallm.integrations.atropos.trainer_client import ApiFacts

WAITING = ApiFacts(state="waiting", registered_at=1.0, status=ApiStatus(step=0, num_queued=0))
QUEUED = ApiFacts(state="waiting", registered_at=1.0, status=ApiStatus(step=0, num_queued=6))
FACTS = AtroposFacts(
    url="http://127.0.0.1:8001",
    sizes=Sizes(batch_size=8, max_token_len=512),
    api=WAITING,
    num_groups=0,
    num_sequences=0,
    group_sizes={},
    last_groups={},
    refused={},
    ledger_completions=0,
    ledger_tokens=0,
    num_recorded=0,
    last_recorded_at=None,
)
BUSY = Observed(num_completions=4, num_registered=1)


def names(api: ApiFacts = WAITING, **observed: Any) -> list[str]:
    facts = dataclasses.replace(FACTS, api=api)
    return [cause.name for cause in causes_of(facts, dataclasses.replace(BUSY, **observed))]


def text(api: ApiFacts = WAITING, **observed: Any) -> str:
    facts = dataclasses.replace(FACTS, api=api)
    return causes_of(facts, dataclasses.replace(BUSY, **observed))[0].text


def environment(**fields: Any) -> EnvironmentFacts:
    return EnvironmentFacts(**({"name": "words", "log": "words.log", "exit_code": None} | fields))


def test_a_run_in_which_nothing_is_wrong_may_only_be_slow() -> None:
    assert names() == ["slow"]


def test_groups_of_three_never_fill_a_batch_of_eight() -> None:
    assert names(QUEUED, sizes=frozenset({3})) == ["size_does_not_divide"]
    assert "a multiple of 3" in text(QUEUED, sizes=frozenset({3}))


def test_a_group_of_nine_blocks_batches_of_eight() -> None:
    assert names(QUEUED, sizes=frozenset({2, 9})) == ["group_too_large"]


def test_groups_of_three_beside_groups_of_four_wait_for_ever() -> None:
    assert names(QUEUED, sizes=frozenset({3, 4})) == ["sizes_do_not_divide"]


@pytest.mark.parametrize("sizes", [{2}, {8}, {2, 8}, {1, 2, 4}])
def test_sizes_that_divide_one_another_and_the_batch_are_no_cause(sizes: set[int]) -> None:
    assert names(QUEUED, sizes=frozenset(sizes)) == ["slow"]


def test_sizes_of_an_empty_queue_are_no_cause() -> None:
    assert names(WAITING, sizes=frozenset({3})) == ["slow"]


def test_an_environment_with_a_minimum_and_no_groups_is_named_with_its_id() -> None:
    found = text(QUEUED, allocated=0.5, without_groups=(1,), sizes=frozenset({4}))
    assert "50% of each batch" in found
    assert "id 1 have none" in found
    assert "http://127.0.0.1:8001/disconnect-env" in found


def test_environments_without_a_minimum_may_have_no_groups() -> None:
    assert names(without_groups=(0,)) == ["slow"]


def test_an_api_that_does_not_answer_is_named_first() -> None:
    api = ApiFacts(state="unreachable", problem="connection refused")
    assert names(api, num_completions=0, num_registered=None) == ["api_unreachable"]
    assert "rollout.atropos.start.api=true" in text(api)


def test_a_poisoned_api_is_named() -> None:
    assert names(ApiFacts(state="poisoned"))[0] == "api_poisoned"


def test_batches_that_the_api_has_lost_are_named() -> None:
    assert names(dataclasses.replace(WAITING, num_failed_batches=2)) == ["batches_lost"]


def test_batches_lost_before_the_last_step_no_longer_matter() -> None:
    facts = dataclasses.replace(
        FACTS, api=dataclasses.replace(WAITING, num_failed_batches=2), wait=Wait(number=3, num_failed_batches=2)
    )
    assert [cause.name for cause in causes_of(facts, BUSY)] == ["slow"]


def test_completions_asked_of_the_default_ports_explain_the_ignored_flag() -> None:
    assert names(num_completions=0, knocks=(9004,)) == ["wrong_servers"]
    assert "--openai.base_url" in text(num_completions=0, knocks=(9004,))


def test_another_program_on_the_default_ports_is_suspected() -> None:
    assert names(num_completions=0, taken_ports=(9004,)) == ["other_servers"]
    assert names(num_completions=9, taken_ports=(9004,)) == ["slow"]


def test_without_environments_one_is_asked_for() -> None:
    assert names(num_completions=0, num_registered=0) == ["no_environment"]


def test_an_environment_that_asks_nothing_is_silent() -> None:
    assert names(num_completions=0, num_registered=1) == ["silent_environment"]


def test_an_environment_that_cannot_be_started_is_named_with_its_last_words() -> None:
    dead = environment(exit_code=1, has_given_up=True, log_tail="ModuleNotFoundError: nltk")
    assert names(environments=[dead]) == ["words_dead"]
    assert "ModuleNotFoundError: nltk" in text(environments=[dead])


def test_an_environment_that_has_ended_by_itself_is_named() -> None:
    assert names(environments=[environment(exit_code=0)]) == ["words_finished"]


@pytest.mark.parametrize("sign", ["equal_scores", "too_long", "wrong_size", "nothing_collected", "trajectories_failed"])
def test_groups_that_an_environment_drops_are_named_with_the_reason(sign: str) -> None:
    assert names(num_completions=100, environments=[environment(counts={sign: 3})]) == [f"words_{sign}"]


def test_the_longest_sequence_is_told_where_it_is_the_reason() -> None:
    assert "max_token_len=512" in text(environments=[environment(counts={"too_long": 1})])


def test_groups_that_vanish_without_a_word_are_told() -> None:
    assert names(num_completions=16) == ["groups_vanish"]


def test_groups_that_we_refuse_are_counted_by_reason_with_where_to_look() -> None:
    found = text(refused={"unmatched": 1, "stale": 3})
    assert "(stale: 3, unmatched: 1); stale: older than trainer.max_off_policy_steps allows" in found
    assert found.endswith("see quarantine.jsonl")


def test_groups_that_quarantine_does_not_keep_are_not_looked_for_there() -> None:
    assert "quarantine.jsonl" not in text(refused={"stale": 3, "no_signal": 1})


def test_an_environment_that_falls_silent_after_groups_of_no_use_is_told_behind_them() -> None:
    assert names(num_completions=0, refused={"ragged": 2}) == ["refused_ragged", "silent_environment"]
