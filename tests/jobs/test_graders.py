"""Graders: rewards, templates, formulas, and what is refused by name."""

from typing import Any

import pytest

from parallm.errors import InvalidRequest
from parallm.jobs.graders import check_item, grade, read_grader


def check(
    operation: str, reference: str = "{{item.answer}}", given: str = "{{ sample.output_text }}"
) -> dict[str, Any]:
    return {"type": "string_check", "name": "a", "input": given, "operation": operation, "reference": reference}


def similarity(metric: str) -> dict[str, Any]:
    return {
        "type": "text_similarity",
        "input": "{{sample.output_text}}",
        "reference": "{{item.answer}}",
        "evaluation_metric": metric,
    }


@pytest.mark.parametrize(
    ("operation", "text", "reward"),
    [
        ("eq", "Five", 1.0),
        ("eq", "five", 0.0),
        ("ne", "five", 1.0),
        ("ne", "Five", 0.0),
        ("like", "it is Five.", 1.0),
        ("like", "it is five.", 0.0),
        ("ilike", "it is FIVE.", 1.0),
        ("ilike", "", 0.0),
    ],
)
def test_a_check_of_strings_pays_all_or_nothing(operation: str, text: str, reward: float) -> None:
    assert grade(read_grader(check(operation)), {"answer": "Five"}, text) == reward


@pytest.mark.parametrize(
    ("template", "item", "text", "filled"),
    [
        ("#### {{item.n}}", {"n": 5}, "", "#### 5"),
        ("{{item.a.b}}", {"a": {"b": [1, 2]}}, "", "[1, 2]"),
        ("{{ sample.output_json.a.b }}!", {}, '{"a": {"b": "x"}}', "x!"),
        ("{{sample.output_json.a}}", {}, "no json", ""),
        ("{{sample.output_json.a}}", {}, "[" * 100_000, ""),
        ("{{item.text}}", {"text": "{{item.secret}}", "secret": "s"}, "", "{{item.secret}}"),
        ("plain", {}, "", "plain"),
    ],
)
def test_templates_are_filled_once(template: str, item: dict[str, Any], text: str, filled: str) -> None:
    assert grade(read_grader(check("eq", filled.replace("{{", "{ {"), template)), item, text) == float(
        "{{" not in filled
    )


@pytest.mark.parametrize(
    ("metric", "ours", "theirs", "reward"),
    [
        ("rouge_1", "the cat sat", "The cat", 0.8),
        ("rouge_2", "the cat sat", "the cat", 2 / 3),
        ("rouge_5", "a b c", "a b c", 0.0),
        ("rouge_l", "the big cat sat", "the cat sat down", 0.75),
        ("rouge_l", "", "the cat", 0.0),
        ("rouge_1", "", "", 0.0),
        # 4 + 3 + 2 + 1 n-grams; of the first 3 + 2 + 1 + 0 match
        ("gleu", "the cat sat down", "the cat sat up", 0.6),
        ("gleu", "the cat", "the cat", 1.0),
        ("gleu", "", "", 0.0),
    ],
)
def test_similarity_is_that_of_the_papers(metric: str, ours: str, theirs: str, reward: float) -> None:
    assert grade(read_grader(similarity(metric)), {"answer": theirs}, ours) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("formula", "reward"),
    [("a + 2 * b", 2.0), ("max(a, b) ^ 2 - -1", 2.0), ("min(a, b) / 2", 0.0), ("exp(a) * sqrt(b + 3) / 2", 1.0)],
)
def test_a_formula_combines_graders(formula: str, reward: float) -> None:
    graders = {"a": check("eq", "x"), "b": check("like", "y")}
    grader = read_grader({"type": "multi", "graders": graders, "calculate_output": formula})
    assert grade(grader, {}, "yes") == pytest.approx(reward)


FORMULAS = [
    "c",
    "a.real",
    "a if a else a",
    "__import__('os')",
    "(lambda: a)()",
    "a(",
    "1 / (a - a)",
    "a, a",
    "'x'",
    "max(a=a)",
]
FORMULAS += ["9 ^ 9 ^ 9 ^ 9", "(" * 2000 + "a" + ")" * 2000, "not a", "max()", "True"]


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_formula_is_numbers_and_names_alone(formula: str) -> None:
    with pytest.raises(InvalidRequest):
        read_grader({"type": "multi", "graders": {"a": check("eq")}, "calculate_output": formula})


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        ({"type": "python", "source": "import os"}, "python is refused"),
        ({"type": "score_model"}, "score_model is refused"),
        ({"type": "multi", "graders": {"a": {"type": "python"}}, "calculate_output": "a"}, "python is refused"),
        ({"type": "other"}, "string_check"),
        ({}, "wrong"),
        (check("matches"), "operation"),
        (check("eq") | {"color": "red"}, "color"),
        (similarity("cosine"), "evaluation_metric"),
        (check("eq", "{{sample.tokens}}"), "output_text"),
        (check("eq", "{{secret}}"), "variable"),
        (check("eq", "{{item}}"), "variable"),
    ],
)
def test_other_graders_are_refused_with_the_reason(grader: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refusal:
        read_grader(grader)
    assert refusal.value.parameter == "method.reinforcement.grader"


def test_a_line_without_what_the_grader_reads_is_found() -> None:
    grader = read_grader(check("eq", "{{item.answer.number}}"))
    check_item(grader, {"answer": {"number": 0}})
    with pytest.raises(InvalidRequest, match="10000"):
        check_item(grader, {"answer": {"number": "5" * 10_001}})
    for item in ({}, {"answer": 5}, {"answer": {"number": None}}):
        with pytest.raises(InvalidRequest, match=r"answer\.number"):
            check_item(grader, item)


def test_a_template_that_repeats_the_completion_without_end_is_refused() -> None:
    def grader(count: int) -> dict[str, object]:
        return {
            "type": "text_similarity",
            "input": "{{sample.output_text}} " * count,
            "reference": "a",
            "evaluation_metric": "rouge_l",
        }

    read_grader(grader(8))
    with pytest.raises(InvalidRequest, match="9 times, the limit is 8"):
        read_grader(grader(9))
