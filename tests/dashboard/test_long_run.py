"""A run of 10,000 steps in a browser: when its numbers stand there, what a step costs, and what memory it takes."""

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest
from playwright.sync_api import CDPSession, Page, expect

from tests.dashboard.answers import Answers
from tests.dashboard.conftest import OpenPage
from tests.dashboard.stage import Stage
from tests.dashboard.test_page import VIEWS

NUM_LOADS = 7
NUM_LIVE = 600
Record = Callable[[str, Any], None]


@pytest.fixture(scope="module")
def long_stage() -> Iterator[Stage]:
    with Stage(Answers(num_steps=10_000)) as made:
        yield made


def numbers_at(page: Page) -> float:
    """Return the seconds from the request for the page to its numbers."""
    expect(page.locator(".figure .value").first).not_to_be_empty()
    return float(page.evaluate("performance.getEntriesByName('numbers')[0].startTime")) / 1000


def heap_mb(session: CDPSession) -> float:
    """Return the memory of scripts after a collection, in MB."""
    session.send("HeapProfiler.collectGarbage")
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float({one["name"]: one["value"] for one in metrics}["JSHeapUsedSize"]) / 1e6


def durations(page: Page, name: str) -> list[float]:
    """Return the milliseconds of what the page has measured under a name, the shortest first."""
    found: list[float] = page.evaluate(f"performance.getEntriesByName('{name}').map((one) => one.duration)")
    return sorted(found)


def test_the_history_of_a_long_run_is_bounded(long_stage: Stage, open_page: OpenPage) -> None:
    page = open_page(long_stage).page
    expect(page.locator(".step")).to_have_text("step 10,000 of 20,000")
    assert long_stage.answers is not None
    assert len(long_stage.answers.history()["starts"]) <= 1024


@pytest.mark.slow
def test_numbers_stand_there_at_once(long_stage: Stage, open_page: OpenPage, record_property: Record) -> None:
    seconds = []
    for _ in range(NUM_LOADS):
        page = open_page(long_stage).page
        seconds.append(numbers_at(page))
        page.close()
    record_property("dashboard.first_look_seconds", median(seconds))
    assert median(seconds) <= 1.0


@pytest.mark.slow
def test_steps_and_the_cursor_cost_little_and_memory_stays(
    long_stage: Stage, open_page: OpenPage, record_property: Record
) -> None:
    page = open_page(long_stage).page
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    for view in VIEWS:
        page.goto(f"{long_stage.url}#{view}")
        expect(page.locator("main .view")).not_to_be_empty()
        page.wait_for_timeout(1500)
    page.goto(f"{long_stage.url}#curves")
    expect(page.locator(".js-plotly-plot").first).to_be_visible(timeout=20_000)
    page.wait_for_timeout(2000)
    before = heap_mb(session)
    assert long_stage.answers is not None
    for step in range(10_001, 10_001 + NUM_LIVE):
        long_stage.tell("step", {**long_stage.answers.row(step), "policy": "policy"})
        page.wait_for_timeout(20)
    expect(page.locator(".step")).to_contain_text(f"step {10_000 + NUM_LIVE:,}")
    page.mouse.move(300, 300)
    for x in range(300, 500, 4):
        page.mouse.move(x, 300)
        page.wait_for_timeout(20)
    page.wait_for_timeout(500)
    growth = heap_mb(session) - before
    steps, cursor = durations(page, "step"), durations(page, "cursor")
    figures = {
        "dashboard.heap_mb": before,
        "dashboard.heap_growth_mb": growth,
        "dashboard.redraw_p95_ms": steps[int(0.95 * len(steps))],
        "dashboard.cursor_p95_ms": cursor[int(0.95 * len(cursor))],
    }
    for name, value in figures.items():
        record_property(name, value)
    assert figures["dashboard.heap_mb"] <= 120
    assert figures["dashboard.heap_growth_mb"] <= 5
