"""`/v1/device`: numbers over time, the time line, and the completions one by one."""

import time
from typing import Any

import pytest

from parallm.device.spans import Span
from parallm.metrics.watching import Watching
from parallm.types import EngineRow
from tests.server.conftest import send_to
from tests.watching.conftest import application

ROW = EngineRow(
    request_id="chatcmpl-7",
    index=0,
    traffic="serving",
    model="policy@3",
    is_running=True,
    num_prompt_tokens=5,
    num_sampled=2,
    max_tokens=9,
    seconds=0.1234,
)


def test_pulses_are_columns_over_time(watching: Watching) -> None:
    app = application(watching)
    watching.device_name = "a device"
    for second in range(3):
        watching.pulse.beat(time.time() - 3 + second)
    found = send_to(app, "GET", "/v1/device").json()
    assert (found["name"], found["bucket"], len(found["times"])) == ("a device", 1, 3)
    assert found["columns"]["tokens/rollout"] == [11, 11, 11]
    assert found["columns"]["max_rows"] == [128, 128, 128]
    assert send_to(app, "GET", "/v1/device?minutes=60").json()["bucket"] == 60


def test_the_time_line_counts_from_now(watching: Watching) -> None:
    now = time.perf_counter()
    spans = [Span("rollout", now - 100, now - 50), Span("learning", now - 50, now - 49)]
    app = application(watching, spans=lambda start: [span for span in spans if span.end > start])
    found = send_to(app, "GET", "/v1/device/timeline?seconds=60").json()
    assert found["work"] == ["rollout", "learning"]
    (rollout, learning) = found["spans"]
    assert (rollout[0], rollout[1]) == (0, -60)
    assert rollout[2] == pytest.approx(10, abs=5)
    assert learning == [1, pytest.approx(-50, abs=5), pytest.approx(1, abs=0.01)]
    assert send_to(application(watching), "GET", "/v1/device/timeline").json()["spans"] == []


def test_completions_are_listed_without_their_texts(watching: Watching) -> None:
    async def rows() -> list[EngineRow]:
        return [ROW]

    found = send_to(application(watching, rows=rows), "GET", "/v1/device/rows").json()
    assert (found["max_rows"], found["waiting"]) == (128, 0)
    assert found["rows"] == [
        {
            "id": "chatcmpl-7",
            "index": 0,
            "traffic": "serving",
            "model": "policy@3",
            "is_running": True,
            "prompt_tokens": 5,
            "sampled": 2,
            "max_tokens": 9,
            "seconds": 0.12,
        }
    ]


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v1/device?minutes=0", 400, "minutes=0 should be from 1 to 10080"),
        ("/v1/device/timeline?seconds=601", 400, "seconds=601 should be above 0 and at most 600"),
        ("/v1/device/timeline?seconds=nan", 400, "seconds"),
        ("/v1/device/rows", 409, "does not list its completions"),
    ],
)
def test_wrong_questions_are_answered_with_the_way_out(watching: Watching, path: str, status: int, text: str) -> None:
    answer: Any = send_to(application(watching), "GET", path)
    assert answer.status_code == status
    assert text in answer.json()["error"]["message"]
