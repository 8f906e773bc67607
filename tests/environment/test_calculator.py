import pytest

from parallm.environment.arithmetic import Calculator, result_after
from parallm.environment.settings import ArithmeticSettings, CalculatorSettings
from parallm.types import Message, Problem

PROBLEM = Problem(problem_id="p", messages=(Message(role="user", content="Tom has 12 apples ..."),), answer="24")
CALCULATOR = Calculator(CalculatorSettings(problems=ArithmeticSettings(num_train=4, num_test=4)))


def turns(*texts: str) -> list[Message]:
    return [Message(role="assistant", content=text) for text in texts]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("3 * 4 = ", "12"),
        ("3 * 4 =", " 12"),
        ("3*4=", "12"),
        ("4 - 9 = ", "-5"),
        ("-5 + 9 = ", "4"),
        ("3 * 4 = 12\n12 + 12 = ", "24"),
        ("They have 3 * 4 = ", "12"),
        ("1 + 3 * 4 = ", ""),
        ("1.5 * 4 = ", ""),
        ("3 * x = ", ""),
        ("= ", ""),
        ("3 * 4 = 12", ""),
    ],
)
def test_only_a_sum_of_two_whole_numbers_is_worked_out(text: str, result: str) -> None:
    assert result_after(text) == result


def test_the_model_goes_on_behind_the_result_in_its_own_text() -> None:
    assert CALCULATOR.reply(PROBLEM, turns("3 * 4 = ")) == turns("12")
    assert CALCULATOR.reply(PROBLEM, turns("3 * 4 = ", "12", "\n12 + 12 = ")) == turns("24")


def test_an_equals_sign_without_a_sum_is_passed_over() -> None:
    assert CALCULATOR.reply(PROBLEM, turns("x = ")) == turns("")


def test_an_answer_without_an_equals_sign_at_its_end_is_the_last_turn() -> None:
    assert CALCULATOR.reply(PROBLEM, turns("3 * 4 = ", "12", "\n#### 12")) is None
    assert CALCULATOR.reply(PROBLEM, turns("")) is None


def test_an_episode_is_scored_like_an_answer_and_its_sums_are_counted() -> None:
    episode = turns("3 * 4 = ", "12", "\n12 + 12 = ", "24", "\n#### 24")
    assert CALCULATOR.score(PROBLEM, episode) == {"correct": 1.0, "format": 1.0, "calls": 2.0}
    assert CALCULATOR.score(PROBLEM, turns("")) == {"correct": 0.0, "format": 0.0, "calls": 0.0}
    assert set(CALCULATOR.weights) == {"correct", "format"}


def test_the_problems_are_those_of_arithmetic() -> None:
    assert CALCULATOR.problems("train")[0].problem_id == "arithmetic-train-0"
