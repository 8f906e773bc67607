"""The routes of a step's completions: lists, one group, what is damaged, who may read."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from parallm.metrics.rollout_files import RolloutFiles
from parallm.metrics.rollout_folder import file_name
from parallm.metrics.rollout_format import encode
from parallm.metrics.token_texts import TokenTexts
from parallm.metrics.watching import Watching
from parallm.types import FaultyEpisode
from tests.metrics.test_rollout_format import STEP, group, learned, trajectory
from tests.watching.conftest import RUN

Get = Callable[..., Any]
GROUPS = "/v1/runs/current/rollouts/7"


def letters(rows: Any) -> list[str]:
    return ["".join(chr(97 + token) for token in tokens) for tokens in rows]


@pytest.fixture
def files(tmp_path: Path, watching: Watching) -> Iterator[RolloutFiles]:
    texts = TokenTexts(letters)
    made = RolloutFiles(
        tmp_path, lambda rollouts, _: encode(rollouts, texts.cut), max_bytes=1 << 20, is_decoding=lambda: False
    )
    watching.runs["policy"].rollouts = made.reading
    yield made
    made.close()


@pytest.fixture
def get(app: FastAPI, files: RolloutFiles) -> Get:
    """Ask after one step of four groups was written."""
    faulty = FaultyEpisode(kind="score_raised", detail="KeyError: 'x'", text="?", tokens=())
    wide = group(trajectory((1, 2, 3), 2.0), trajectory((4,), -1.0), number=3)
    files.put(replace(STEP, groups=[*STEP.groups, replace(group(number=2), faulty=(faulty,)), wide]))
    files.close()
    client = TestClient(app, base_url="http://localhost")
    return lambda path, **query: client.get(path, params=query or None)


def test_the_steps_are_listed(get: Get) -> None:
    answer = get("/v1/runs/current/rollouts").json()
    row = answer["steps"][0]
    assert (row["step"], row["groups"], row["completions"], row["with_signal"], row["kept"]) == (7, 4, 5, 2, False)
    assert (answer["damaged"], answer["dropped"]) == ([], 0)
    assert get(f"/v1/runs/{RUN}/rollouts").json() == answer


def test_the_steps_of_a_problem_are_listed(get: Get) -> None:
    assert [
        (row["group"], row["problem_reward"]) for row in get("/v1/runs/current/rollouts", problem="p3").json()["steps"]
    ] == [(3, 0.5)]
    assert get("/v1/runs/current/rollouts", problem="none").json()["steps"] == []


def test_the_groups_of_a_step_are_listed_without_texts(get: Get) -> None:
    groups = get(GROUPS).json()["groups"]
    assert [one["group"] for one in groups] == [0, 1, 2, 3]
    assert (groups[0]["rewards"], groups[0]["advantages"], groups[0]["lengths"]) == ([1.0, 0.0], [0.5, None], [3, 2])
    assert groups[2]["faulty"] == [{"kind": "score_raised", "detail": "KeyError: 'x'"}]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"sort": "spread"}, [3, 0, 1, 2]),
        ({"sort": "reward"}, [0, 3, 1, 2]),
        ({"sort": "length"}, [0, 3, 1, 2]),
        ({"signal": "true"}, [0, 3]),
        ({"search": "P3"}, [3]),
        ({"search": "BCD"}, [0, 3]),
        ({"environment": "other"}, []),
    ],
)
def test_groups_are_sorted_and_found(get: Get, query: dict[str, str], expected: list[int]) -> None:
    assert [one["group"] for one in get(GROUPS, **query).json()["groups"]] == expected


def test_a_group_comes_with_the_numbers_of_its_tokens(get: Get) -> None:
    answer = get(f"{GROUPS}/0").json()
    assert answer["messages"] == [{"role": "user", "content": "12 + 3?"}]
    assert (answer["answer"], answer["groups"]) == ("15", 4)
    first, second = answer["completions"]
    assert first["tokens"] == {
        "ids": [1, 2, 3],
        "texts": ["b", "c", "d"],
        "logprobs": [0.0, -0.5, -1.0],
        "learner_logprobs": None,
        "entropies": [0.0, 0.25, 0.5],
        "trained": [[0, 1], [2, 3]],
        "clipped": [2],
        "advantages": None,
        "learned": True,
    }
    assert (second["advantage"], second["tokens"]["entropies"], second["tokens"]["learned"]) == (None, None, False)
    assert first["versions"] == [{"version": 3, "start": 0, "end": 3}]


def test_log_probs_that_differ_come_with_it(app: FastAPI, files: RolloutFiles) -> None:
    one = STEP.groups[0].trajectories[0]
    files.put(replace(STEP, learned={(0, 0): learned(one, 0, logprobs=[0.0, -0.5, -1.25])}))
    files.close()
    answer = TestClient(app, base_url="http://localhost").get(f"{GROUPS}/0").json()
    assert answer["completions"][0]["tokens"]["learner_logprobs"] == [0.0, -0.5, -1.25]
    assert answer["completions"][1]["tokens"]["learner_logprobs"] is None


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v1/runs/other/rollouts", 404, "no run 'other'"),
        ("/v1/runs/current/rollouts/8", 404, "no completions of step 8"),
        (f"{GROUPS}/9", 404, "its groups are 0 to 3"),
        (f"{GROUPS}/-1", 404, "its groups are 0 to 3"),
        (f"{GROUPS}?sort=name", 400, "sort"),
        ("/v1/runs/current/rollouts/99999999999999999999999", 404, "no completions"),
        ("/v1/runs/current/rollouts/7/0?policy=other", 404, "other"),
    ],
)
def test_what_is_not_there_is_named(get: Get, path: str, status: int, text: str) -> None:
    answer = get(path)
    assert (answer.status_code, text in answer.json()["error"]["message"]) == (status, True), answer.text


def test_a_damaged_file_is_listed_with_its_reason(get: Get, app: FastAPI, files: RolloutFiles, tmp_path: Path) -> None:
    (tmp_path / "rollouts" / file_name(9)).write_bytes(b"\xff" * 64)
    assert get("/v1/runs/current/rollouts").json()["damaged"] == [
        {"step": 9, "reason": "it is no whole safetensors file"}
    ]
    answer = get("/v1/runs/current/rollouts/9")
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "rollouts_damaged")


def test_a_run_that_keeps_none_says_so(app: FastAPI) -> None:
    answer = TestClient(app, base_url="http://localhost").get("/v1/runs/current/rollouts")
    assert (answer.status_code, "metrics.rollouts=off" in answer.text) == (404, True)
