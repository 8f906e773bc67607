"""The page in a browser: views, addresses, keys, what is live and what is not."""

import re

import pytest
from playwright.sync_api import APIResponse, Route, expect

from tests.dashboard.answers import RUN, Answers
from tests.dashboard.conftest import PAGE, OpenPage
from tests.dashboard.stage import Stage

VIEWS = re.findall(r'name: "(\w+)"', (PAGE / "views.js").read_text())
LAYOUTS = [(width, theme) for width in (360, 768, 1440) for theme in ("light", "dark")]


def test_the_overview_says_whether_it_learns_and_from_which_step_on(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage).page
    expect(page.locator(".verdict")).to_contain_text("from step 25 on")
    expect(page.get_by_role("banner")).to_contain_text("step 200 of 400")
    expect(page.locator(".figure").first).to_contain_text("Reward")


def test_a_step_is_drawn_when_it_is_told(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage).page
    expect(page.locator(".news")).to_have_text("live")
    assert stage.answers is not None
    stage.tell("step", {**stage.answers.row(201), "reward/mean": 0.98765, "policy": "policy"})
    expect(page.locator(".figure", has_text="Reward").first).to_contain_text("0.9877")
    expect(page.locator(".step")).to_have_text("step 201 of 400")


def test_an_address_opens_a_view_and_back_returns(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage, "#log?level=ERROR").page
    expect(page.get_by_label("Lowest level")).to_have_value("ERROR")
    page.keyboard.press("g")
    page.keyboard.press("o")
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("Log")


def test_keys_do_nothing_in_fields_and_can_be_switched_off(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage, "#settings").page
    expect(page.get_by_label("Find a setting")).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("go")
    expect(page.get_by_role("heading", level=1)).to_have_text("Settings")
    page.get_by_label("Single keys").uncheck()
    page.get_by_role("heading", level=1).click()
    page.keyboard.type("go")
    expect(page.get_by_role("heading", level=1)).to_have_text("Settings")
    page.get_by_label("Single keys").check()


@pytest.mark.parametrize(("path", "place"), [("session", "header .run"), ("runs/current/history*", "header .step")])
def test_an_answer_that_comes_late_replaces_no_newer_one(open_page: OpenPage, path: str, place: str) -> None:
    def of_steps(num_steps: int) -> Answers:
        return Answers(num_steps=num_steps, text=lambda _: f"named {num_steps}", trains=path != "session")

    held: list[tuple[Route, APIResponse]] = []
    with Stage(of_steps(5)) as stage:
        page = open_page(stage).page
        expect(page.locator(place)).to_contain_text("5")
        expect(page.locator(".news")).to_have_text("live")
        page.route(f"**/v1/{path}", lambda route: held.append((route, route.fetch())), times=1)
        stage.answers = of_steps(6)
        stage.tell("lost", {})
        while not held:
            page.wait_for_timeout(20)
        stage.answers = of_steps(7)
        stage.tell("lost", {})
        expect(page.locator(place)).to_contain_text("7")
        route, answer = held[0]
        route.fulfill(response=answer)
        page.wait_for_timeout(500)
        expect(page.locator(place)).to_contain_text("7")


def test_the_page_says_when_it_is_not_live_and_comes_back(open_page: OpenPage) -> None:
    with Stage(Answers()) as stage:
        page = open_page(stage).page
        expect(page.locator(".news")).to_have_text("live")
        stage.refusals["/v1/events"] = (503, "busy")
        stage.hang_up()
        expect(page.locator(".news")).to_have_text("not connected")
        del stage.refusals["/v1/events"]
        expect(page.locator(".news")).to_have_text("live", timeout=10_000)


def test_another_epoch_makes_the_page_read_anew(open_page: OpenPage) -> None:
    with Stage(Answers()) as stage:
        page = open_page(stage).page
        expect(page.locator(".step")).to_have_text("step 200 of 400")
        stage.answers = Answers(num_steps=120, epoch="other")
        stage.hang_up()
        expect(page.locator(".step")).to_have_text("step 120 of 240", timeout=10_000)


def test_what_could_not_be_read_anew_is_read_again(open_page: OpenPage) -> None:
    with Stage(Answers()) as stage:
        page = open_page(stage).page
        expect(page.locator(".step")).to_have_text("step 200 of 400")
        stage.answers = Answers(num_steps=250)
        stage.refusals["/v1/runs/current/history"] = (503, "busy")
        with page.expect_response(lambda answer: answer.status == 503):
            stage.tell("lost", {})
        expect(page.locator(".step")).to_have_text("step 200 of 400")
        del stage.refusals["/v1/runs/current/history"]
        expect(page.locator(".step")).to_have_text("step 250 of 400", timeout=10_000)


def test_a_key_is_asked_for_and_goes_out_as_a_header_only(open_page: OpenPage) -> None:
    with Stage(Answers()) as stage:
        stage.refusals["/v1/session"] = (401, "this server needs an API key")
        page = open_page(stage).page
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("This server needs a key")
        del stage.refusals["/v1/session"]
        dialog.get_by_label("Key").fill("a-key-of-at-least-16")
        page.keyboard.press("Enter")
        expect(page.locator(".verdict")).not_to_be_empty()
        asked = [headers for _, path, headers in stage.asked if path == "/v1/runs/current/history"]
        assert asked[-1]["authorization"] == "Bearer a-key-of-at-least-16"
        assert "a-key-of" not in page.url
        assert page.evaluate("[sessionStorage.length, localStorage.getItem('parallm-key')]") == [1, None]


def test_a_key_in_the_address_is_taken_over_and_removed(open_page: OpenPage) -> None:
    with Stage(Answers()) as stage:
        page = open_page(stage, "#key=a-key-of-at-least-16").page
        expect(page.locator(".verdict")).not_to_be_empty()
        assert page.url.endswith("#overview")
        asked = [headers for _, path, headers in stage.asked if path == "/v1/session"]
        assert asked[-1]["authorization"] == "Bearer a-key-of-at-least-16"


def test_a_server_that_trains_nothing_is_shown_too(open_page: OpenPage) -> None:
    with Stage(Answers(trains=False)) as stage:
        page = open_page(stage).page
        expect(page.locator(".verdict")).to_have_text("Nothing is trained here; this process serves.")
        for view in VIEWS:
            page.goto(f"{stage.url}#{view}")
            expect(page.locator("main h1")).to_be_visible()
            expect(page.get_by_role("alert")).to_have_count(0)


def test_an_error_names_itself_and_can_be_tried_again(open_page: OpenPage) -> None:
    with Stage(Answers()) as stage:
        stage.refusals["/v1/runs/current/config"] = (500, "the file config.yaml cannot be read")
        page = open_page(stage, "#settings").page
        expect(page.get_by_role("alert")).to_contain_text("config.yaml cannot be read")
        stage.refusals.clear()
        page.get_by_role("button", name="Try again").click()
        expect(page.locator("main")).to_contain_text("learner.learning_rate")


def test_a_finished_run_is_shown_as_not_live(stage: Stage, open_page: OpenPage) -> None:
    page = open_page(stage, "#overview?run=arithmetic_grpo~2026-11-22_21-10-00").page
    expect(page.locator(".news")).to_have_text("not live")
    page.goto(f"{stage.url}#overview?run={RUN}")
    expect(page.locator(".news")).to_have_text("live")


@pytest.mark.parametrize(("width", "theme"), LAYOUTS)
def test_no_view_is_wider_than_its_window(stage: Stage, open_page: OpenPage, width: int, theme: str) -> None:
    size = {"width": width, "height": 800}
    page = open_page(stage, viewport=size, color_scheme=theme, has_touch=width == 360).page
    for view in VIEWS:
        page.goto(f"{stage.url}#{view}")
        expect(page.locator("main .view")).not_to_be_empty()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
