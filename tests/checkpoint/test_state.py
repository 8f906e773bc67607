"""Which run may go on from which checkpoint."""

from dataclasses import replace
from typing import Any

import pytest

from parallm.checkpoint.state import RunFacts
from parallm.errors import CheckpointError

KEYS = {"learner.preset": "dapo", "learner.learning_rate": 1e-4, "environment.limit": 8, "rollout.temperature": 1.0}
SAVED = RunFacts(kind="rollout.source=environment", seed=0, problems="ab", keys=KEYS)


def changed(keys: dict[str, Any] | None = None, **values: Any) -> RunFacts:
    return replace(SAVED, keys=KEYS | (keys or {}), **values)


def lines(facts: RunFacts, *, is_same_run: bool) -> list[str]:
    try:
        facts.check_fits(SAVED, "RUN/step_1", is_same_run=is_same_run)
    except CheckpointError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize("is_same_run", [False, True])
def test_no_run_goes_on_from_one_of_another_kind(is_same_run: bool) -> None:
    assert lines(changed(kind="learner=sft"), is_same_run=is_same_run) == [
        "RUN/step_1 is of a run with rollout.source=environment, and this one is with learner=sft; choose "
        "rollout.source=environment, or start a new run from its adapter: checkpoint.resume=never "
        "model.adapter=RUN/step_1"
    ]


@pytest.mark.parametrize("is_same_run", [False, True])
def test_a_checkpoint_wins_over_no_other_adapter(is_same_run: bool) -> None:
    (line,) = lines(changed(start="cd"), is_same_run=is_same_run)
    assert line.startswith(
        "model.adapter names an adapter, and the run of RUN/step_1 began from a new one; leave model"
    )
    given = replace(SAVED, start="cd")
    given.check_fits(given, "RUN/step_1", is_same_run=is_same_run)
    SAVED.check_fits(given, "RUN/step_1", is_same_run=is_same_run)  # the checkpoint holds what became of it


@pytest.mark.parametrize(
    ("facts", "keys"),
    [
        (changed(seed=1), ["seed=1"]),
        (changed({"learner.preset": "gspo"}), ["learner.preset=gspo"]),
        (changed({"environment.limit": 9}, problems="cd"), ["environment.limit=9"]),
        (changed({"environment.limit": 9, "environment.path": "x"}, seed=1, problems="cd"), [
            "seed=1", "environment.limit=9", "environment.path=x",
        ]),
    ],
    ids=["seed", "preset", "problems", "all"],
)  # fmt: skip
def test_auto_goes_on_with_the_same_run_and_a_name_with_any(facts: RunFacts, keys: list[str]) -> None:
    found = lines(facts, is_same_run=True)
    assert [line.partition(":")[0] for line in found] == keys
    assert all(line.endswith("or branch off with checkpoint.resume=RUN/step_1") for line in found)
    assert lines(facts, is_same_run=False) == []
    assert len(facts.changes(SAVED)) >= 1


@pytest.mark.parametrize(
    ("facts", "change"),
    [
        (changed({"learner.learning_rate": 2e-4}), "learner.learning_rate=0.0002 (was 0.0001)"),
        (changed({"rollout.temperature": 0.5}), "rollout.temperature=0.5 (was 1.0)"),
        (changed({"environment.limit": 9}), "environment.limit=9 (was 8)"),  # and yet the same problems
    ],
    ids=["rate", "temperature", "limit"],
)
def test_what_a_researcher_changes_is_taken_and_said(facts: RunFacts, change: str) -> None:
    assert lines(facts, is_same_run=True) == []
    assert facts.changes(SAVED) == [change]


def test_places_count_in_the_same_problems_and_order_and_scores_with_the_same_keys() -> None:
    for facts, draws, scores in (
        (SAVED, True, True),
        (changed(seed=1), False, True),
        (changed(problems="cd"), False, True),  # an environment that makes up problems anew
        (changed({"environment.limit": 9}, problems="cd"), False, False),
    ):
        assert (facts.draws_same_problems(SAVED), facts.scores_same_problems(SAVED)) == (draws, scores)
    assert SAVED.draws_same_problems(None)
    assert SAVED.scores_same_problems(None)
