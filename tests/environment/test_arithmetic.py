import random
import re

import pydantic
import pytest

from parallm.environment.arithmetic import KINDS, MAX_NUMBER, Arithmetic, drafts, work_out
from parallm.environment.settings import ArithmeticSettings
from parallm.types import Message, Problem

PROBLEM = Problem(problem_id="p", messages=(Message(role="user", content="Tom has 12 apples ..."),), answer="24")


def numbers_of(problem: Problem) -> tuple[str, ...]:
    """The story without its names and items: its numbers and the words around them."""
    return tuple(re.findall(r"\d+|gets|gives|bags|coins|more|fewer|times|loses|earns", problem.messages[0].content))


def test_train_and_held_out_problems_share_no_question_and_no_numbers_of_one_kind() -> None:
    environment = Arithmetic(ArithmeticSettings())
    train = {numbers_of(problem) for problem in environment.problems("train")}
    held_out = {numbers_of(problem) for problem in environment.problems("test")}
    assert not train & held_out


def test_held_out_problems_of_one_seed_never_stand_in_the_train_split_of_another() -> None:
    held_out = {numbers_of(problem) for problem in Arithmetic(ArithmeticSettings(seed=1)).problems("test")}
    train = {numbers_of(problem) for problem in Arithmetic(ArithmeticSettings(seed=2)).problems("train")}
    assert not train & held_out


def test_the_same_settings_give_the_same_problems_and_another_seed_gives_others() -> None:
    first = Arithmetic(ArithmeticSettings(num_train=50))
    assert first.problems("train") == Arithmetic(ArithmeticSettings(num_train=50)).problems("train")
    assert first.problems("train") != Arithmetic(ArithmeticSettings(num_train=50, seed=1)).problems("train")


def test_a_longer_split_begins_with_the_problems_of_a_shorter_one() -> None:
    short = Arithmetic(ArithmeticSettings(num_test=20)).problems("test")
    assert Arithmetic(ArithmeticSettings(num_test=60)).problems("test")[:20] == short


def test_splits_have_the_sizes_asked_for_and_no_question_twice() -> None:
    environment = Arithmetic(ArithmeticSettings(num_train=300, num_test=70))
    assert len({problem.messages[0].content for problem in environment.problems("train")}) == 300
    assert len({problem.problem_id for problem in environment.problems("test")}) == 70


def test_only_the_levels_asked_for_appear() -> None:
    problems = Arithmetic(ArithmeticSettings(levels=(1, 3), num_train=200)).problems("train")
    assert {problem.level for problem in problems} == {1, 3}


@pytest.mark.parametrize("levels", [(), (4,), (0, 1)])
def test_levels_that_do_not_exist_are_refused(levels: tuple[int, ...]) -> None:
    with pytest.raises(pydantic.ValidationError):
        ArithmeticSettings(levels=levels)  # type: ignore[arg-type]


EXPECTED = {
    "gain": lambda n: n["a"] + n["b"],
    "loss": lambda n: n["a"] - n["b"],
    "bags": lambda n: n["b"] * n["c"],
    "refill": lambda n: n["a"] + n["b"] * n["c"],
    "shop": lambda n: n["a"] - n["b"] * n["c"],
    "trade": lambda n: n["a"] + n["b"] - n["c"],
    "more": lambda n: n["a"] + (n["a"] + n["b"]),
    "fewer": lambda n: n["a"] + (n["a"] - n["b"]),
    "times": lambda n: n["b"] + n["b"] * n["c"],
    "wages": lambda n: n["a"] - n["b"] * n["c"] + n["d"],
    "pair": lambda n: n["b"] * n["c"] + n["d"] * n["e"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_of_each_kind_gives_the_right_answer(kind: str) -> None:
    source = drafts(random.Random(3), [kind])
    for draft in (next(source) for _ in range(200)):
        answer = work_out(KINDS[kind].plan, draft.numbers)[1][-1]
        assert answer == EXPECTED[kind](draft.numbers)
        assert 0 < answer <= MAX_NUMBER
        assert sorted(map(int, re.findall(r"\d+", draft.question))) == sorted(draft.numbers.values())


def test_an_answer_can_be_read_off_the_question() -> None:
    for problem in Arithmetic(ArithmeticSettings(levels=(2,), num_train=300)).problems("train"):
        question = problem.messages[0].content
        if "bags of" in question:
            had, bags, size = map(int, re.findall(r"\d+", question))
            assert problem.answer == str(had + bags * size)


def test_steps_are_written_out_with_their_results() -> None:
    lines, results = work_out(("b*c", "a+x"), {"a": 12, "b": 3, "c": 4})
    assert lines == ["3 * 4 = 12", "12 + 12 = 24"]
    assert results == [12, 24]


@pytest.mark.parametrize(
    ("text", "correct", "well_formed"),
    [
        ("3 * 4 = 12\n12 + 12 = 24\n#### 24", 1, 1),
        ("#### 24\n", 1, 1),
        ("3 * 4 = 12\n#### 12", 0, 1),
        ("3 * 4 = 12\n12 + 12 = 24", 0, 0),
        ("#### 12\n#### 24", 1, 0),
        ("#### 24\n#### 12", 0, 0),
        ("#### 24 apples", 0, 0),
        ("#### 24\nBye!", 1, 0),
        ("The answer is #### 24", 0, 0),
        ("#### 240", 0, 1),
        ("#### 24\n24", 1, 0),
        ("", 0, 0),
    ],
)
def test_an_answer_is_scored_by_its_last_final_line(text: str, correct: float, well_formed: float) -> None:
    assert Arithmetic(ArithmeticSettings()).score(PROBLEM, text) == {"correct": correct, "format": well_formed}


def test_the_weights_of_a_perfect_answer_add_up_to_one() -> None:
    environment = Arithmetic(ArithmeticSettings())
    parts = environment.score(PROBLEM, "12 + 12 = 24\n#### 24")
    assert sum(environment.weights[name] * part for name, part in parts.items()) == pytest.approx(1.0)
