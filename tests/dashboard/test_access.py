"""What axe finds in every view, and that all can be reached by keyboard."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.dashboard.conftest import PAGE, OpenPage
from tests.dashboard.stage import Stage

VIEWS = [*re.findall(r'name: "(\w+)"', (PAGE / "views.js").read_text()), "samples/200/1?colour=difference"]
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
QUICK = [(1440, "light"), (360, "dark")]
SLOW = [(width, theme) for width in (360, 768, 1440) for theme in ("light", "dark") if (width, theme) not in QUICK]
LAYOUTS = [*QUICK, *(pytest.param(*layout, marks=pytest.mark.slow) for layout in SLOW)]


def findings_of(page: Page) -> list[str]:
    """Return rule and element of each finding of axe."""
    found: Any = Axe().run(page, options={"runOnly": {"type": "tag", "values": TAGS}}).response
    return [f"{one['id']}: {node['html'][:160]}" for one in found["violations"] for node in one["nodes"]]


def settle(page: Page, stage: Stage, view: str) -> None:
    page.goto(f"{stage.url}#{view}")
    expect(page.locator("main .view")).not_to_be_empty()
    page.wait_for_timeout(200)


@pytest.mark.parametrize(("width", "theme"), LAYOUTS)
def test_axe_finds_nothing(
    stage: Stage, open_page: OpenPage, width: int, theme: str, record_property: Callable[[str, object], None]
) -> None:
    size = {"width": width, "height": 900}
    page = open_page(stage, viewport=size, color_scheme=theme, bypass_csp=True).page
    found = {}
    for view in VIEWS:
        settle(page, stage, view)
        found[view] = findings_of(page)
    record_property("dashboard.axe_findings", sum(map(len, found.values())))
    assert {view: one for view, one in found.items() if one} == {}


def test_axe_would_find_a_field_without_a_name(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage, bypass_csp=True).page
    settle(page, stage, "overview")
    page.evaluate("document.querySelector('main').append(document.createElement('select'))")
    assert any(one.startswith("select-name") for one in findings_of(page))


@pytest.mark.parametrize("view", VIEWS)
def test_every_control_is_reached_by_tab(stage: Stage, open_page: OpenPage, view: str) -> None:
    page = open_page(stage).page
    settle(page, stage, view)
    wanted = page.evaluate(
        """() => [...document.querySelectorAll("a[href], button, input, select, textarea, [tabindex='0']")]
        .filter((one) => !one.disabled && one.checkVisibility() && one.type !== "radio").length"""
    )
    reached = page.evaluate("() => { window.reached = new Set(); return 0; }")
    for _ in range(wanted + 10):
        page.keyboard.press("Tab")
        page.evaluate("window.reached.add(document.activeElement)")
    reached = page.evaluate("[...window.reached].filter((one) => one !== document.body && one.type !== 'radio').length")
    assert reached >= wanted


def test_an_update_leaves_the_focus_where_it_is(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage).page
    expect(page.locator(".news")).to_have_text("live")
    link = page.get_by_role("link", name="Reward")
    link.focus()
    assert stage.answers is not None
    for step in range(300, 304):
        stage.tell("step", {**stage.answers.row(step), "policy": "policy"})
    expect(page.locator(".step")).to_contain_text("step 303")
    expect(link).to_be_focused()


def test_changes_of_state_are_told_to_screen_readers(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage).page
    expect(page.get_by_role("status")).to_contain_text("updating")
