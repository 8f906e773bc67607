"""Training files in OpenAI's form, and the numbers that follow from their sizes."""

import json
from pathlib import Path
from typing import Any

import pytest

from parallm.errors import ProblemError
from parallm.jobs.graders import read_grader
from parallm.jobs.plan import ReinforcementHyperparameters, TuningRequest, Usual, make_plan, tuned_name
from parallm.jobs.training_files import GradedProblems, read_problems, write_demonstrations

USER, ANSWER = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}
GRADER = read_grader(
    {
        "type": "string_check",
        "input": "{{sample.output_text}}",
        "operation": "eq",
        "reference": "{{item.reference_answer}}",
    }
)
USUAL = Usual(problems_per_step=16, group_size=8, learning_rate=1e-4, steps=100, evaluate_every=20, evaluate_samples=0)


def demonstrations(tmp_path: Path, *rows: Any) -> list[Any]:
    source, target = tmp_path / "rows.jsonl", tmp_path / "train.jsonl"
    source.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    write_demonstrations(source, target)
    return [json.loads(line) for line in target.read_text().splitlines()]


def test_each_turn_of_the_assistant_is_learned_but_those_without_weight(tmp_path: Path) -> None:
    second: dict[str, Any] = {"role": "assistant", "content": "7", "weight": 1}
    messages: list[dict[str, Any]] = [USER, ANSWER | {"weight": 0}, USER, second]
    turns = [{"role": one["role"], "content": one["content"]} for one in messages]
    (one,) = demonstrations(tmp_path, {"messages": messages})
    assert one == {"messages": turns[:3], "completion": "7"}
    assert len(demonstrations(tmp_path, {"messages": [USER, ANSWER, USER, second]}, "")) == 2
    assert demonstrations(tmp_path, {"prompt": "2 + 3 =", "completion": " 5"}) == [
        {"prompt": "2 + 3 =", "completion": " 5"}
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2 is no JSON"),
        ("[]", "line 2 is no JSON object"),
        ({"messages": []}, "line 2 has no messages"),
        ({"messages": [USER, ANSWER], "tools": []}, "'tools'"),
        ({"messages": [USER, ANSWER | {"tool_calls": []}]}, "'tool_calls'"),
        ({"messages": [USER, ANSWER | {"role": "tool"}]}, "role"),
        ({"messages": [USER, ANSWER | {"content": [{"type": "image_url"}]}]}, "images"),
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "weight"),
        ({"messages": [ANSWER]}, "first message"),
        ({"prompt": "a"}, "texts"),
        ({"input": {}, "preferred_output": []}, "'input'"),
    ],
)
def test_other_lines_are_refused_by_number(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ProblemError, match="line 2") as refusal:
        demonstrations(tmp_path, {"messages": [USER, ANSWER]}, row)
    assert message in str(refusal.value)


def test_a_file_without_anything_to_learn_is_refused(tmp_path: Path) -> None:
    for rows in ([], [{"messages": [USER]}]):
        with pytest.raises(ProblemError, match="no turn"):
            demonstrations(tmp_path, *rows)


def test_problems_are_graded_by_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "developer", "content": "Add."}, USER], "reference_answer": 5}))
    problems = read_problems(file, GRADER, "train")
    environment = GradedProblems(grader=GRADER, train=problems, test=[])
    assert [message.role for message in problems[0].messages] == ["system", "user"]
    assert environment.score(problems[0], "5") == {"reward": 1.0, "correct": 1.0}
    assert environment.score(problems[0], "6") == {"reward": 0.0, "correct": 0.0}
    file.write_text(json.dumps({"messages": [USER, ANSWER], "reference_answer": 5}))
    with pytest.raises(ProblemError, match="line 1: the last message"):
        read_problems(file, GRADER, "train")


def request(kind: Any, **hyperparameters: Any) -> TuningRequest:
    given = ReinforcementHyperparameters(**hyperparameters)
    return TuningRequest(model="base", kind=kind, hyperparameters=given, seed=0)


def test_auto_becomes_numbers() -> None:
    plan = make_plan(request("supervised"), USUAL, 100)
    assert (plan.steps, plan.batch_size, plan.learning_rate) == (19, 16, 1e-4)
    assert plan.hyperparameters == {"batch_size": 16, "learning_rate_multiplier": 1.0, "n_epochs": 3}
    assert make_plan(request("supervised"), USUAL, 5).batch_size == 5
    assert make_plan(request("reinforcement"), USUAL, 400).steps == 100
    assert make_plan(request("reinforcement"), USUAL, 100_000).hyperparameters["n_epochs"] == 1


def test_hyperparameters_are_honoured() -> None:
    given = {"batch_size": 10, "n_epochs": 2, "learning_rate_multiplier": 3, "compute_multiplier": 0.5}
    plan = make_plan(request("reinforcement", **given, eval_interval=7, eval_samples=4), USUAL, 95)
    assert (plan.steps, plan.batch_size, plan.group_size) == (19, 10, 4)
    assert plan.learning_rate == pytest.approx(3e-4)
    assert (plan.evaluate_every, plan.evaluate_samples) == (7, 4)
    assert make_plan(request("reinforcement", compute_multiplier=0.01), USUAL, 95).group_size == 2


@pytest.mark.parametrize(
    ("base", "suffix", "name"),
    [
        ("nano", "sums", "ft:nano:sums:0123456789ab"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "", "ft:Qwen2.5-0.5B-Instruct::0123456789ab"),
        ("/models/my model (2)/", "", "ft:my-model-2::0123456789ab"),
        ("...", "", "ft:model::0123456789ab"),
    ],
)
def test_models_have_names_of_openais_form(base: str, suffix: str, name: str) -> None:
    assert tuned_name(base, suffix, "ftjob-0123456789abcdef") == name


def test_rows_that_are_nested_too_deeply_are_refused_at_every_depth(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    problems, refusals = [], set[str]()
    for depth in range(100, 1100):
        answer = "[" * depth + "]" * depth
        file.write_text(f'{{"messages": [{json.dumps(USER)}], "reference_answer": {answer}}}')
        try:
            problems += read_problems(file, GRADER, "train")
        except ProblemError as error:
            refusals.add(str(error).partition(":")[0])
    assert (0 < len(problems) < 1000, refusals) == (True, {"line 1 is no JSON"})
