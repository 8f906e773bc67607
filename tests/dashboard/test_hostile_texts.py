"""Texts of models, clients, environments, files and logs never act, whatever they hold; a sink put in is caught."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import cycle

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.dashboard.answers import Answers
from tests.dashboard.conftest import PAGE, OpenPage, Watched
from tests.dashboard.hostile_texts import HOSTILE_TEXTS, LONG_TEXT, MARK
from tests.dashboard.stage import Stage

VIEWS = re.findall(r'name: "(\w+)"', (PAGE / "views.js").read_text())
FIELDS = {
    "log": ("log", "fault", "reason", "problem id", "kind"),
    "device": ("request id", "adapter"),
    "settings": ("setting", "value"),
    "runs": ("run name",),
    "curves?table=1&find=/": ("reward part", "environment"),
    "samples/60": ("prompt", "answer", "fault kind"),
    "traffic": ("prompt", "completion", "reason", "request id"),
    "samples/60/1": ("completion", "reward part", "prompt", "fault text"),
}
"""Fields that a view shows one by one."""


class Texts:
    """Gives each field the hostile texts in turn."""

    def __init__(self) -> None:
        self._turns: dict[str, Iterator[str]] = defaultdict(lambda: cycle(HOSTILE_TEXTS))

    def __call__(self, field: str) -> str:
        return next(self._turns[field])


def always(text: str) -> Callable[[str], str]:
    return lambda field: text


def shown(text: str) -> str:
    """Return what the page shows of a text: characters that cannot be seen as their codes."""
    text = re.sub("(\u0301{5})\u0301+", r"\1…", text)
    return "".join(character if is_seen(character) else f"U+{ord(character):04X}" for character in text)


def is_seen(character: str) -> bool:
    return character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Cn")


def violations(page: Page) -> list[str]:
    """Return what the policy refused, except for the styles of maps, which plotly wants when it is loaded."""
    found: list[str] = page.evaluate("window.violations ?? []")
    return [one for one in found if one != "style-src-elem plotly.min.js"]


NOTE_VIOLATIONS = """addEventListener("securitypolicyviolation", (event) =>
  (window.violations ??= []).push(event.effectiveDirective + " " + (event.sourceFile ?? "").split("/").at(-1)))"""


@pytest.fixture(scope="module")
def hostile() -> Iterator[Stage]:
    with Stage(Answers(num_steps=60, text=Texts(), num_texts=len(HOSTILE_TEXTS))) as stage:
        yield stage


def visit(watched: Watched, url: str, address: str) -> Page:
    watched.page.goto(f"{url}#{address}")
    expect(watched.page.locator("main .view")).not_to_be_empty()
    watched.page.wait_for_timeout(150)
    return watched.page


def did_act(page: Page) -> bool:
    return bool(
        page.evaluate(f"window.{MARK} !== undefined || document.querySelector('main script, main iframe') !== null")
    )


def test_there_are_sixty() -> None:
    assert len(set(HOSTILE_TEXTS)) == 60


def test_no_text_acts_in_any_view(
    hostile: Stage, open_page: OpenPage, record_property: Callable[[str, object], None]
) -> None:
    watched = open_page(hostile)
    watched.page.add_init_script(NOTE_VIOLATIONS)
    watched.page.reload()
    acted = []
    for view in (*VIEWS, "samples/60/1"):
        page = visit(watched, hostile.url, view)
        acted += [view] if did_act(page) else []
        acted += violations(page)
    record_property("dashboard.hostile_acted", len(acted + watched.errors + watched.elsewhere))
    assert acted == []
    assert watched.page.evaluate("Object.prototype.last === undefined && ({}).low === undefined")


@pytest.mark.parametrize("address", FIELDS)
def test_every_text_is_shown_as_it_is(hostile: Stage, open_page: OpenPage, address: str) -> None:
    page = visit(open_page(hostile), hostile.url, address)
    expect(page.locator("main")).to_contain_text(shown(HOSTILE_TEXTS[5])[:60])
    text = page.locator("main").evaluate("(main) => main.textContent")
    missing = [one for one in HOSTILE_TEXTS if shown(one)[:60] not in text]
    assert missing == []


def test_no_name_of_the_server_acts_in_the_header(open_page: OpenPage) -> None:
    with Stage(Answers(num_steps=5, trains=False)) as stage:
        watched = open_page(stage)
        expect(watched.page.locator(".news")).to_have_text("live")
        for text in HOSTILE_TEXTS:
            stage.answers = Answers(num_steps=5, text=always(text), trains=False)
            stage.tell("lost", {})
            expect(watched.page.locator("header .run")).to_contain_text(shown(text)[:60].strip())
            assert not did_act(watched.page)


def test_errors_of_the_server_are_texts_too(open_page: OpenPage) -> None:
    with Stage(Answers(num_steps=5)) as stage:
        watched = open_page(stage, "#settings")
        for text in HOSTILE_TEXTS[::6]:
            stage.refusals["/v1/runs/current/config"] = (500, text)
            watched.page.reload()
            expect(watched.page.get_by_role("alert")).to_contain_text(shown(text)[:60].strip())
            assert not did_act(watched.page)


def test_a_megabyte_without_a_space_neither_widens_the_page_nor_stops_it(open_page: OpenPage) -> None:
    with Stage(
        Answers(num_steps=5, text=lambda field: LONG_TEXT if field in ("log", "fault", "value") else field)
    ) as stage:
        watched = open_page(stage, viewport={"width": 360, "height": 700})
        for view in ("log", "settings"):
            page = visit(watched, stage.url, view)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("bypass_csp", [False, True])
def test_a_sink_put_in_is_caught(browser: Browser, hostile: Stage, bypass_csp: bool) -> None:
    """With the policy it is refused and noted; without it the texts act, and the same checks see it."""

    def with_sink(route: Route) -> None:
        text = (PAGE / "element.js").read_text()
        safe = "element.append(document.createTextNode(visible(child)))"
        assert safe in text
        sink = "{ const box = document.createElement('span'); box.innerHTML = String(child); element.append(box); }"
        route.fulfill(body=text.replace(safe, sink), content_type="text/javascript")

    context = browser.new_context(bypass_csp=bypass_csp)
    context.add_init_script(NOTE_VIOLATIONS)
    context.route("**/element.js", with_sink)
    watched = Watched(context, hostile.url.removesuffix("dashboard/"))
    watched.page.goto(f"{hostile.url}#log")
    watched.page.wait_for_timeout(1500)
    noted = violations(watched.page) + watched.errors + watched.elsewhere
    context.close()
    assert noted
