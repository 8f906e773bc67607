"""`/v1/runs/current/history`: groups and rows as JSON, bytes and stalls of a first look at a long run."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from parallm.metrics.watching import Watching
from parallm.server.dashboard.runs import Runs
from tests.server.conftest import send_to
from tests.watching.conftest import application, row, served

PATH = "/v1/runs/current/history"
MAX_FIRST_LOOK_BYTES = 400_000
MAX_STALL_SECONDS = 0.030
MAX_STALL_SHARE = 0.3


@pytest.fixture
def long_run(watching: Watching) -> Watching:
    """10,000 steps of 42 metrics that nothing can compress."""
    chance = random.Random(0)
    for step in range(1, 10_001):
        watching.runs["policy"].history.append({"step": step, **{f"m/{name}": chance.random() for name in range(42)}})
    return watching


def test_groups_and_rows_have_the_documented_form(app: FastAPI, watching: Watching) -> None:
    for step in range(1, 41):
        watching.runs["policy"].step(row(step, same=2))
    found = send_to(app, "GET", f"{PATH}?points=2").json()
    assert (found["first"], found["last"], found["bucket"], found["starts"]) == (1, 40, 32, [1, 33])
    assert found["constant"] == {"same": 2}
    assert found["columns"]["reward/mean"] == {"low": [0.125, 4.125], "high": [4.0, 5.0], "last": [4.0, 5.0]}
    rows = send_to(app, "GET", f"{PATH}?since=38&names=reward/mean").json()
    assert rows == {
        "epoch": found["epoch"],
        "steps": [39, 40],
        "columns": {"reward/mean": [4.875, 5.0]},
        "more": False,
    }
    assert send_to(app, "GET", f"/v1/runs/{watching.run_id}/history?points=2").json() == found


def test_before_the_first_step_there_is_an_empty_history(app: FastAPI) -> None:
    found = send_to(app, "GET", PATH).json()
    assert (found["first"], found["last"], found["starts"], found["columns"]) == (None, None, [], {})


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ("points=0", 400, "points=0 should be from 1 to 2048"),
        ("points=9999", 400, "points=9999 should be from 1 to 2048"),
        ("points=x", 400, "points"),
        ("since=0&names=nope", 400, "no metric 'nope' in this run"),
        ("policy=poet", 404, "no policy 'poet' is trained here; there are policy"),
    ],
)
def test_wrong_questions_are_answered_with_the_way_out(
    app: FastAPI, watching: Watching, query: str, status: int, text: str
) -> None:
    watching.runs["policy"].step(row(1))
    answer = send_to(app, "GET", f"{PATH}?{query}")
    assert answer.status_code == status
    assert text in answer.json()["error"]["message"]


def test_a_process_that_trains_nothing_has_no_current_run() -> None:
    app = application(Watching())
    answer = send_to(app, "GET", PATH)
    assert answer.status_code == 404
    assert send_to(app, "GET", "/v1/session").json()["run"] is None


def test_a_first_look_at_ten_thousand_steps_is_bounded(long_run: Watching) -> None:
    app = application(long_run)
    answer = send_to(app, "GET", PATH, headers={"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert int(answer.headers["content-length"]) <= MAX_FIRST_LOOK_BYTES
    assert len(answer.json()["starts"]) == 625


async def read_in_the_loop(runs: Runs, function: Callable[[], Any]) -> Any:
    return function()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("reader", ["thread", "loop"])
def test_a_first_look_at_ten_thousand_steps_stops_the_loop_for_milliseconds(
    long_run: Watching, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds of the event loop's thread, since the clock of a loaded machine counts others' time, too. The control
    makes the answer in the loop."""
    if reader == "loop":
        monkeypatch.setattr(Runs, "read", read_in_the_loop)

    async def turns() -> tuple[float, float]:
        """Return seconds of the longest turn of the loop, and of all threads until the answer."""
        app = application(long_run)
        async with served(app) as client:
            await client.get("/v1/session")  # imports and first connections
            start = time.process_time()
            looking = asyncio.create_task(client.get(PATH))
            longest = 0.0
            while not looking.done():
                began = time.thread_time()
                await asyncio.sleep(0.001)
                longest = max(longest, time.thread_time() - began)
            answer: httpx.Response = await looking
            assert answer.status_code == 200
        return longest, time.process_time() - start

    longest, whole = asyncio.run(turns())
    is_short = longest <= min(MAX_STALL_SECONDS, MAX_STALL_SHARE * whole)
    assert is_short is (reader == "thread"), f"{1000 * longest:.1f} of {1000 * whole:.1f} ms"
