"""Each trap of run-api and its environments that shows on the trainer's side is named with a way out."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from parallm.integrations.atropos.diagnosis import causes_of
from parallm.integrations.atropos.source import AtroposFacts
from parallm.integrations.atropos.supervisor import SupervisedProcess
from parallm.integrations.atropos.trainer_client import ApiFacts, Sizes

WAITING = ApiFacts(state="waiting", registered_at=1.0)
QUEUED = ApiFacts(state="waiting", registered_at=1.0, num_queued=6)
FACTS = AtroposFacts(
    url="http://127.0.0.1:8001", sizes=Sizes(batch_size=8, max_token_len=512), api=WAITING, num_completions=4
)


def process(
    exit_code: int | None = None, *, has_given_up: bool = False, log: Path = Path("words.log")
) -> SupervisedProcess:
    one = SupervisedProcess("words", (), folder=Path(), variables={}, log=log, max_restarts=5)
    one.exit_code, one.has_given_up = exit_code, has_given_up
    return one


RUNNING = process()


def names(*environments: SupervisedProcess, **facts: Any) -> list[str]:
    return list(causes_of(dataclasses.replace(FACTS, **facts), environments))


def text(*environments: SupervisedProcess, **facts: Any) -> str:
    return next(iter(causes_of(dataclasses.replace(FACTS, **facts), environments).values()))


def test_a_run_in_which_nothing_is_wrong_may_only_be_slow() -> None:
    assert names(RUNNING) == ["slow"]


@pytest.mark.parametrize("size", [3, 9, 16])
def test_a_group_that_does_not_divide_the_batch_blocks_the_queue(size: int) -> None:
    api = dataclasses.replace(QUEUED, last_group_size=size)
    assert names(api=api) == ["size_does_not_divide"]
    assert f"a multiple of {size}" in text(api=api)


def test_a_group_that_divides_the_batch_and_one_that_has_left_the_queue_are_no_cause() -> None:
    assert names(api=dataclasses.replace(QUEUED, last_group_size=1)) == ["slow"]
    assert names(api=dataclasses.replace(WAITING, last_group_size=3)) == ["slow"]


def test_a_queue_that_forms_no_batch_is_explained_with_the_way_to_disconnect_an_environment() -> None:
    api = dataclasses.replace(QUEUED, last_group_size=4)
    assert names(api=api) == ["queue_blocked"]
    assert "http://127.0.0.1:8001/disconnect-env" in text(api=api)
    assert '{"env_id": ID}' in text(api=api)


def test_an_api_that_does_not_answer_is_the_only_cause() -> None:
    api = ApiFacts(state="unreachable", problem="connection refused")
    assert names(api=api, num_completions=0) == ["api_unreachable"]
    assert "rollout.atropos.start.api=true" in text(api=api)


def test_a_poisoned_api_is_named() -> None:
    assert names(api=ApiFacts(state="poisoned"))[0] == "api_poisoned"


def test_batches_that_the_api_has_lost_are_named() -> None:
    assert names(num_failed_batches=2) == ["batches_lost"]


def test_an_environment_that_cannot_be_started_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "words.log"
    log.write_text("ModuleNotFoundError: nltk\n")
    dead = process(1, has_given_up=True, log=log)
    assert names(dead) == ["words_dead"]
    assert "ModuleNotFoundError: nltk" in text(dead)


def test_an_environment_that_has_ended_by_itself_is_named() -> None:
    assert names(process(0)) == ["words_finished"]


def test_a_server_that_no_environment_asks_is_explained_with_the_flag_that_atroposlib_drops() -> None:
    assert names(RUNNING, num_completions=0) == ["no_requests"]
    assert "--openai.base_url" in text(RUNNING, num_completions=0)
    assert "words.log" in text(RUNNING, num_completions=0)


def test_groups_that_vanish_are_explained() -> None:
    assert names(num_completions=16) == ["groups_vanish"]
    assert names(num_completions=16, api=QUEUED) == ["slow"]


def test_refused_groups_are_counted_by_reason_with_where_to_look() -> None:
    explanation = text(refused={"unmatched": 1, "stale": 3})
    assert "(stale: 3, unmatched: 1); stale: older than trainer.max_off_policy_steps allows" in explanation
    assert explanation.endswith("see quarantine.jsonl")


def test_groups_that_quarantine_does_not_keep_are_not_looked_for_there() -> None:
    assert "quarantine.jsonl" not in text(refused={"stale": 3, "no_signal": 1})


def test_silence_after_groups_of_no_use_is_a_cause_of_its_own() -> None:
    assert names(num_completions=0, refused={"ragged": 2}) == ["refused_ragged", "no_requests"]
