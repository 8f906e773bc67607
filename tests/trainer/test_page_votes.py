"""Votes and corrections in the page become rewards that the nano model trains on: a browser and a real run."""

import os
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.dashboard.conftest import QUIET, chromium

LIVE = {"source": "live", "problems_per_step": 1, "group_size": 2, "max_tokens": 16}
SECONDS = 60


def test_votes_and_corrections_in_the_chat_are_trained_on(run_with_client: Callable[..., int]) -> None:
    path = chromium()
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium: .ci/run installs it by apt-get")
        pytest.skip("no chromium")

    def act(client: httpx.Client) -> None:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=list(QUIET))
            try:
                use(browser.new_page(), client)
            finally:
                browser.close()

    assert run_with_client(act, rollout=LIVE, trainer={"steps": 1000, "max_off_policy_steps": 4}) == 0


def use(page: Page, client: httpx.Client) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{client.base_url}/dashboard/#chat?left=policy&right=policy")
    page.get_by_label("max tokens").fill("8")
    page.get_by_label("seed").fill("1")
    page.get_by_label("learn from this").check()
    ask(page, "1 + 1 = ?")
    expect(page.locator("main")).to_contain_text("Both answers have the same tokens.")
    page.get_by_role("button", name="how likely is the left answer").click()
    expect(page.locator(".note")).to_contain_text("the whole text is 1 times as likely there")
    page.get_by_label("good: the left answer").click()
    expect(page.locator("main")).to_contain_text("good; reward 1 sent for chatcmpl-")
    page.get_by_label("bad: the right answer").click()
    expect(page.locator("main")).to_contain_text("bad; reward 0 sent for chatcmpl-")
    page.goto(f"{client.base_url}/dashboard/#traffic")
    expect(page.locator("main")).to_contain_text("0 waiting · 2 rewarded")
    expect(page.locator("tbody tr")).to_have_count(2)
    client.post("/v1/training/resume").raise_for_status()
    wait_for_step(client, 1)
    page.goto(f"{client.base_url}/dashboard/#samples/1/0")
    expect(page.locator("article")).to_have_count(2)
    expect(page.locator("article h3").first).to_contain_text(re.compile(r"reward [01] · advantage [+-]0\.7"))
    assert errors == []
    correct(page, client)
    assert errors == []


def correct(page: Page, client: httpx.Client) -> None:
    page.goto(f"{client.base_url}/dashboard/#chat?left=policy&right=base")
    page.get_by_label("max tokens").fill("8")
    page.get_by_label("learn from this").check()
    ask(page, "2 + 2 = ?")
    card = page.get_by_label("left answers")
    card.get_by_text("correct it").click()
    card.get_by_role("textbox").fill("nothing like it: \u4e2d")
    card.get_by_role("button", name="send the correction").click()
    expect(card.locator(".muted[role=status]").last).to_contain_text(
        "0% like your correction; reward 0 sent for chatcmpl-"
    )
    # the base does not learn, so votes for it stay in the page
    page.get_by_label("good: the right answer").click()
    expect(page.get_by_label("right answers")).to_contain_text("good; kept on this page only")
    expect(page.locator("main")).to_contain_text("base 1 of 1")
    recent: Any = client.get("/v1/trajectories/recent", params={"state": "rewarded"}).json()["data"]
    assert [row["parts"] for row in recent] == [{"likeness": 0.0}]


def ask(page: Page, prompt: str) -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("button", name="send", exact=True)).to_be_enabled(timeout=30_000)
    expect(page.get_by_label("good: the left answer")).to_be_visible()


def wait_for_step(client: httpx.Client, step: int) -> None:
    ends = time.monotonic() + SECONDS
    while client.get("/v1/training/status").json()["step"] < step:
        assert time.monotonic() < ends, client.get("/v1/training/status").text
        time.sleep(0.05)
