"""A browser for the tests of the page: Debian's chromium, driven by playwright."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.dashboard.answers import Answers
from tests.dashboard.stage import Stage

PAGE = Path(__file__).parents[2] / "parallm" / "server" / "dashboard" / "page"
# without them chromium knocks at a network that may be closed
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)

expect.set_options(timeout=20_000)  # of a machine that has other work


def chromium() -> str | None:
    return os.environ.get("PARALLM_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-headless-shell")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser of the module: one of the session would keep playwright's event loop open beside other tests'."""
    path = chromium()
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium: .ci/run installs it by apt-get")
        pytest.skip("no chromium; apt-get install chromium, or set PARALLM_CHROMIUM")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=list(QUIET))
        yield opened
        opened.close()


class Watched:
    """A page with what went wrong in it."""

    def __init__(self, context: BrowserContext, own: str) -> None:
        self.page: Page = context.new_page()
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self._note(request.url, own))
        self.page.on("dialog", lambda dialog: self._dialog(dialog))

    def _note(self, url: str, own: str) -> None:
        if not url.startswith((own, "data:", "blob:")):
            self.elsewhere.append(url)

    def _dialog(self, dialog: Any) -> None:
        self.errors.append(f"dialog: {dialog.message}")
        dialog.dismiss()


OpenPage = Callable[..., Watched]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Open the page of a stage at an address such as `#log`; fails at the end if a script failed or a request went
    elsewhere."""
    contexts: list[BrowserContext] = []
    opened: list[Watched] = []

    def open_one(stage: Stage, address: str = "#overview", **options: Any) -> Watched:
        context = browser.new_context(
            **{"viewport": {"width": 1440, "height": 900}, "reduced_motion": "reduce"} | options
        )
        contexts.append(context)
        watched = Watched(context, stage.url.removesuffix("dashboard/"))
        opened.append(watched)
        watched.page.goto(stage.url + address)
        return watched

    yield open_one
    for context in contexts:
        context.close()
    assert [watched.errors for watched in opened if watched.errors] == []
    assert [watched.elsewhere for watched in opened if watched.elsewhere] == []


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """A stage with a run of 200 steps."""
    with Stage(Answers()) as made:
        yield made
