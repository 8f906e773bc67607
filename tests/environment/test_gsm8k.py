"""Problems from jsonl files and the scores of completions."""

import json
from pathlib import Path

import pytest

from parallm.environment.gsm8k import Gsm8k
from parallm.environment.settings import Gsm8kSettings
from parallm.errors import ProblemError

ROWS = [
    {"question": "How much are 2 and 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {"question": "How much are 600 and 600?", "answer": "600 + 600 = 1200\n#### 1,200"},
    {"question": "How much are 1 and 1?", "answer": "#### 2"},
]


def write(file: Path, *rows: object) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "train.jsonl", *ROWS)
    write(tmp_path / "test.jsonl", *ROWS[:2])
    return tmp_path


def test_a_folder_gives_both_splits_in_the_order_of_the_files(folder: Path) -> None:
    environment = Gsm8k(Gsm8kSettings(path=str(folder)))
    assert [problem.answer for problem in environment.problems("train")] == ["5", "1200", "2"]
    assert [problem.problem_id for problem in environment.problems("test")] == ["gsm8k/test/0", "gsm8k/test/1"]


def test_the_model_sees_the_question_only(folder: Path) -> None:
    (message,) = Gsm8k(Gsm8kSettings(path=str(folder))).problems("train")[0].messages
    assert (message.role, message.content) == ("user", "How much are 2 and 3?")


def test_the_limit_shortens_the_train_split_only(folder: Path) -> None:
    environment = Gsm8k(Gsm8kSettings(path=str(folder), limit=1))
    assert [len(environment.problems("train")), len(environment.problems("test"))] == [1, 2]


def test_one_file_is_the_train_split_and_has_no_test_split(tmp_path: Path) -> None:
    environment = Gsm8k(Gsm8kSettings(path=str(write(tmp_path / "own.jsonl", *ROWS))))
    assert len(environment.problems("train")) == 3
    with pytest.raises(ProblemError, match="evaluate_problems=0"):
        environment.problems("test")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "How much?"}, "no text under the key `answer`"),
        ({"question": "How much?", "answer": "5"}, "must end with `#### NUMBER`"),
        ({"question": "How much?", "answer": "#### five"}, "must end with `#### NUMBER`"),
        ({"question": "How much?", "answer": 5}, "no text under the key `answer`"),
        ({"problem": "How much?", "answer": "#### 5"}, "no text under the key `question`"),
        ([1, 2], "expected an object"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named_by_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    file = write(tmp_path / "own.jsonl", ROWS[0], row)
    with pytest.raises(ProblemError, match=message) as caught:
        Gsm8k(Gsm8kSettings(path=str(file))).problems("train")
    assert f"{file}, line 2" in str(caught.value)


@pytest.mark.parametrize("line", ['{"question": ', "[" * 100_000])
def test_a_line_that_is_not_json_is_named(tmp_path: Path, line: str) -> None:
    file = write(tmp_path / "own.jsonl", ROWS[0])
    file.write_text(f"{file.read_text(encoding='utf-8')}\n{line}", encoding="utf-8")
    with pytest.raises(ProblemError, match="line 3: not JSON"):
        Gsm8k(Gsm8kSettings(path=str(file))).problems("train")


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="train split is empty"):
        Gsm8k(Gsm8kSettings(path=str(write(tmp_path / "own.jsonl")))).problems("train")


def test_a_folder_without_the_split_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"has no train\.jsonl"):
        Gsm8k(Gsm8kSettings(path=str(tmp_path))).problems("train")


@pytest.mark.parametrize("path", ["./nothing", "/nothing/here", "nothing.jsonl", "a/b/c"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(path: str) -> None:
    with pytest.raises(ProblemError, match="no such folder or file"):
        Gsm8k(Gsm8kSettings(path=path)).problems("train")


def test_without_network_a_hub_id_tells_how_to_use_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(ProblemError, match=r"environment\.path=FOLDER"):
        Gsm8k(Gsm8kSettings(path="openai/gsm8k")).problems("train")


def test_hub_rows_become_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, str]] = []

    def load(name: str, configuration: str | None, *, split: str) -> list[dict[str, str]]:
        asked.append((name, configuration, split))
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load)
    assert len(Gsm8k(Gsm8kSettings(path="openai/gsm8k", limit=2)).problems("train")) == 2
    assert asked == [("openai/gsm8k", "main", "train")]


@pytest.mark.parametrize(
    ("text", "strict", "lenient", "form"),
    [
        ("600 + 600 = 1200\n#### 1,200", 1.0, 1.0, 1.0),
        ("#### $1,200.00.", 1.0, 1.0, 1.0),
        ("#### $1200.00", 1.0, 1.0, 1.0),
        ("It is 1200.", 0.0, 1.0, 0.0),
        ("#### 5\n#### 1200", 1.0, 1.0, 0.0),
        ("#### 1200\n#### 5", 0.0, 0.0, 0.0),
        ("#### 1200 or 5", 0.0, 0.0, 0.0),
        ("#### 5 or 1200", 0.0, 1.0, 0.0),
        ("#### 1200\nor not", 1.0, 1.0, 0.0),
        ("#### 1201", 0.0, 0.0, 1.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_scores(folder: Path, text: str, strict: float, lenient: float, form: float) -> None:
    environment = Gsm8k(Gsm8kSettings(path=str(folder), reading="strict"))
    problem = environment.problems("train")[1]
    assert environment.score(problem, text) == {"correct": strict, "format": form}
    relaxed = Gsm8k(Gsm8kSettings(path=str(folder), reading="lenient"))
    assert relaxed.score(problem, text) == {"correct": lenient, "format": form}


def test_the_format_weighs_what_the_settings_say(folder: Path) -> None:
    environment = Gsm8k(Gsm8kSettings(path=str(folder), format_weight=0.25))
    assert environment.weights == {"correct": 1.0, "format": 0.25}
