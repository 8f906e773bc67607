"""The views over text in a browser: a step's groups, a group's tokens, offered trajectories."""

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.dashboard.answers import Answers
from tests.dashboard.conftest import OpenPage
from tests.dashboard.stage import Stage


def module(page: Page, name: str, call: str, *arguments: object) -> Any:
    """Call a function of a module of the page."""
    script = """async ([name, call, values]) => {
      const base = document.querySelector("script[src]").src.replace("app.js", "");
      return (await import(base + name))[call](...values);
    }"""
    return page.evaluate(script, [name, call, list(arguments)])


def test_the_newest_step_is_shown_with_its_groups(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage, "#samples").page
    expect(page.get_by_label("Step", exact=True)).to_have_value("200")
    expect(page.locator("tbody tr")).to_have_count(3)
    expect(page.locator("tbody tr").first).to_contain_text("-0.5 to 0.5")
    expect(page.locator("main")).to_contain_text("2 steps of this run could not be kept")
    expect(page.locator("main")).to_contain_text("The file of step 7 cannot be read")


def test_a_newer_step_is_offered_and_does_not_push_away_what_is_read(open_page: OpenPage) -> None:
    with Stage(Answers()) as stage:
        page = open_page(stage, "#samples/190").page
        expect(page.get_by_label("Step", exact=True)).to_have_value("190")
        assert stage.answers is not None
        stage.answers.num_steps = 201
        expect(page.get_by_role("button", name="step 201 has come")).to_be_visible(timeout=15_000)
        expect(page.get_by_label("Step", exact=True)).to_have_value("190")
        page.get_by_role("button", name="step 201 has come").click()
        expect(page.get_by_label("Step", exact=True)).to_have_value("201")


def test_keys_lead_through_steps_groups_and_rows(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage, "#samples/180").page
    expect(page.locator("tbody tr")).to_have_count(3)
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator("article")).to_have_count(4)
    assert page.url.endswith("#samples/180/1")
    page.keyboard.press("n")
    expect(page.get_by_text(re.compile("group . 2 of 3"))).to_be_visible()
    page.keyboard.press("p")
    expect(page.get_by_text(re.compile("group . 1 of 3"))).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("tbody tr")).to_have_count(3)
    page.keyboard.press("P")
    expect(page.get_by_label("Step", exact=True)).to_have_value("179")


def test_a_group_shows_rewards_parts_and_the_token_under_the_cursor(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage, "#samples/200/1").page
    card = page.get_by_label("Completion 1", exact=True)
    expect(card.locator("h3")).to_have_text("1 · reward 1 · advantage +0.5")
    expect(card).to_contain_text("version 199, 200")
    tokens = card.get_by_role("group")
    tokens.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    info = card.get_by_role("status")
    # the third token ends inside of a character, so it stands with the fourth
    expect(info).to_contain_text('token 3 of 7: "" · id 102')
    expect(info).to_contain_text('token 4 of 7: "é" · id 103 · p 0.0183 (-4) · entropy 2 · learner - sampler -0.5')
    expect(info).to_contain_text("clipped · version 200")
    expect(page.get_by_label("Completion 2", exact=True)).to_contain_text("not trained on")


def test_colours_follow_numbers_and_stay_in_the_address(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage, "#samples/200/1?colour=difference").page
    tokens = page.get_by_label("Completion 1", exact=True).locator(".token")
    expect(tokens.nth(2)).to_have_class("token clipped below")
    page.get_by_label("colour by").select_option("entropy")
    assert "colour=entropy" in page.url
    levels = tokens.evaluate_all("all => all.map((one) => one.style.getPropertyValue('--level'))")
    assert levels == ["0%", "24%", "30%", "6%", "48%", "0%"]
    expect(page.get_by_text("0 to 3 nats")).to_be_visible()


def test_a_table_has_all_numbers_of_the_tokens(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage, "#samples/200/1").page
    page.get_by_label("Completion 1", exact=True).wait_for()
    page.keyboard.press("t")
    table = page.get_by_label("Numbers of Tokens of completion 1")
    expect(table.locator("tbody tr")).to_have_count(7)
    expect(table.locator("tbody tr").nth(3)).to_contain_text("clipped, version 200")
    page.get_by_role("button", name="as table").click()
    expect(table).to_be_hidden()


def test_the_same_problem_is_found_at_other_steps(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage, "#samples/200/1").page
    page.get_by_role("button", name="same problem at other steps").click()
    page.get_by_role("link", name="step 165", exact=True).click()
    assert page.url.endswith("#samples/165/1")
    expect(page.get_by_label("Step", exact=True)).to_have_value("165")


def test_a_problem_opens_in_the_chat(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage, "#samples/200/1").page
    page.get_by_role("link", name="open in chat").click()
    expect(page.get_by_label("Prompt")).to_have_value("prompt")


def test_traffic_shows_what_was_offered_and_why_it_was_dropped(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage, "#traffic").page
    expect(page.locator("main")).to_contain_text(
        "1 waiting · 1 rewarded · 1 in steps not saved yet · 8 trained on · 2 dropped"
    )
    expect(page.locator("tbody tr")).to_have_count(4)
    page.get_by_label("State").select_option("dropped")
    expect(page.locator("tbody tr")).to_have_count(1)


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [([], [], -1), ([1, 2], [1, 2], -1), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([5], [6], 0)],
)
def test_the_first_difference(stage: Stage, open_page: OpenPage, one: Any, other: Any, place: int) -> None:
    assert module(open_page(stage, "#settings").page, "difference.js", "firstDifference", one, other) == place


def test_likeness_is_one_for_equal_words_and_zero_for_others(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage, "#settings").page
    for one, other, expected in [
        ("", "", 1),
        ("12 + 3 = 15", "12 + 3 = 15", 1),
        ("12+3", "12 + 3", 1),
        ("a b c d", "a b", 2 / 3),
        ("yes", "no", 0),
        ("x", "", 0),
        ("word " * 3000, "word " * 3000, 1),
    ]:
        assert module(page, "difference.js", "likeness", one, other) == pytest.approx(expected)
