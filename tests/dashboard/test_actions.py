"""Acts of people in a browser against a run of the nano model: each button works in each role, or says why not."""

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.dashboard.conftest import OpenPage

SECONDS = 120.0
KEYS = {role: f"{role}-0123456789abcdef" for role in ("inference", "training", "admin")}
RUN = (
    "+recipe=arithmetic_grpo",
    "name=run",
    "trainer.steps=100000",
    "trainer.evaluate_problems=8",
    "trainer.evaluate_every=0",
    "rollout.problems_per_step=2",
    "rollout.group_size=4",
    "rollout.max_tokens=24",
    "engine.warmup=false",
    "metrics.display=lines",
    "metrics.curves=false",
    "server.port=0",
)
BAR = ("Pause", "Step", "Save", "Evaluate", "Stop")
CONFIRMED = ("Promote", "Roll back", "Unload", "Pin", "Stop")


@dataclass
class Server:
    """A run with its page at `url`."""

    url: str
    folder: Path
    process: subprocess.Popen[str]

    def client(self, role: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEYS[role]}"}, timeout=SECONDS)

    @property
    def happenings(self) -> list[dict[str, Any]]:
        (file,) = {file.resolve() for file in self.folder.glob("checkpoints/run/*/happenings.jsonl")}
        return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("run")
    keys = [
        f"{{name: {role}, role: {role}, sha256: {hashlib.sha256(key.encode()).hexdigest()}}}"
        for role, key in KEYS.items()
    ]
    command = [sys.executable, "-m", "parallm.train", *RUN, f"server.api_keys=[{', '.join(keys)}]"]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, text=True)
    try:
        yield Server(_address(folder / "output", process), folder, process)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0, (folder / "output").read_text()


def _address(output: Path, process: subprocess.Popen[str]) -> str:
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends and process.poll() is None:
        if found := re.search(r"(http://127\.0\.0\.1:\d+)", output.read_text()):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(output.read_text())


@dataclass
class Addressed:
    """What `open_page` needs of a stage."""

    url: str


def page_of(server: Server, open_page: OpenPage, role: str, view: str = "versions", **options: Any) -> Page:
    page = open_page(Addressed(f"{server.url}/dashboard/"), f"#key={KEYS[role]}", **options).page
    expect(page.locator("h1")).to_have_text("Overview")
    if role == "inference":
        expect(page.locator(".note").first).to_contain_text("this route needs a key with the role training")
    page.goto(f"{server.url}/dashboard/#{view}")
    return page


def bar(page: Page, name: str) -> Locator:
    return page.locator("#actions").get_by_role("button", name=name, exact=True)


def press(page: Page, button: Locator, said: str) -> None:
    """Press a button that works, confirm where it asks, and wait until the page says that it was done."""
    title = button.inner_text()
    expect(button).to_be_enabled(timeout=20_000)
    button.click()
    if title in CONFIRMED:
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_text("As a command")).to_be_visible()
        assert "curl -X" in (dialog.locator("pre").text_content() or "")
        dialog.get_by_role("button", name=re.compile(f"^{title}")).click()
    expect(page.locator(".done p")).to_contain_text(re.compile(said), timeout=60_000)
    assert "curl -X" in (page.locator(".done pre").text_content() or "")
    assert KEYS["admin"] not in page.content()


def has_two_versions(server: Server) -> None:
    with server.client("admin") as client:
        while len(client.get("/v1/adapters").json()["data"]) < 2:
            client.post("/v1/training/update").raise_for_status()


@pytest.mark.parametrize("role", ["inference", "training", "admin"])
def test_a_button_works_or_says_why_not(server: Server, open_page: OpenPage, role: str) -> None:
    has_two_versions(server)
    page = page_of(server, open_page, role)
    expect(page.locator("main table").get_by_role("button", name=re.compile("^Promote")).first).to_be_visible()
    allowed = {"inference": 0, "training": 1, "admin": 2}[role]
    buttons = page.locator(".act button")
    expect(bar(page, "Step")).to_be_enabled(enabled=allowed >= 1, timeout=20_000)
    for index in range(buttons.count()):
        button = buttons.nth(index)
        text, is_disabled, why = found = button.evaluate(
            "one => [one.textContent, one.disabled, one.nextElementSibling.textContent]"
        )
        assert is_disabled == bool(why), found
        needs = 1 if text in (*BAR, "Resume", "Export") else 2
        if needs > allowed:
            assert f"needs a key of the role {'training' if needs == 1 else 'admin'}; yours has the role {role}" in why
        else:
            assert "needs a key" not in why, found


def test_what_is_refused_to_a_role_is_refused_by_the_server_too(server: Server, open_page: OpenPage) -> None:
    page = page_of(server, open_page, "training")
    expect(page.get_by_role("button", name="Roll back")).to_be_disabled()
    page.get_by_role("button", name="Roll back").evaluate("one => { one.disabled = false; one.click(); }")
    page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
    expect(page.locator(".done")).to_contain_text("refused. this route needs a key with the role admin")
    ends, refused = time.monotonic() + 5, list[str]()
    while not refused and time.monotonic() < ends:  # written after the answer, and steps of the run beside it
        time.sleep(0.05)
        refused = [row["text"] for row in server.happenings if row["refused"] and row["by"] == "training"]
    assert ["rolled back" in text for text in refused] == [True]


def test_training_is_paused_stepped_saved_evaluated_and_resumed(server: Server, open_page: OpenPage) -> None:
    page = page_of(server, open_page, "training", "overview")
    press(page, bar(page, "Pause"), "Pause: after the present step")
    press(page, bar(page, "Step"), r"Step: step \d+, paus")
    press(page, bar(page, "Save"), r"Save: in .*step_\d+")
    press(page, bar(page, "Evaluate"), r"Evaluate: policy@\d+ \d")
    press(page, bar(page, "Resume"), r"Resume: step \d+")
    expect(bar(page, "Pause")).to_be_visible(timeout=20_000)
    kinds = [row["kind"] for row in server.happenings if row["refused"] is None]
    assert [kind for kind in ("paused", "stepped", "saved", "evaluated", "resumed") if kind not in kinds] == []


def test_versions_are_promoted_pinned_rolled_back_split_named_saved_and_unloaded(
    server: Server, open_page: OpenPage
) -> None:
    with server.client("training") as client:
        client.post("/v1/training/pause").raise_for_status()
        while client.get("/v1/training/status").json()["state"] != "paused":
            time.sleep(0.05)
        for _ in range(3):
            client.post("/v1/training/update").raise_for_status()
        versions = [card["version"] for card in client.get("/v1/adapters").json()["data"] if card["name"] == "policy"]
    newest, older = sorted(versions, reverse=True)[:2]
    page = page_of(server, open_page, "admin")
    serving = page.locator("main .big")
    expect(serving).to_have_text(f"Clients of policy get policy@{newest}, the newest", timeout=20_000)
    press(page, page.get_by_role("button", name="Roll back"), f"policy is policy@{older} now")
    expect(serving).to_have_text(f"Clients of policy get policy@{older}")

    def row(name: str, version: int) -> Locator:
        return page.get_by_role("button", name=f"{name} policy@{version}", exact=True)

    press(page, row("Promote", newest), "it serves policy now")
    expect(row("Promote", newest)).to_be_disabled()
    press(page, row("Pin", older), f"policy is policy@{older} until")
    expect(serving).to_contain_text(f"policy@{older} 100%")
    press(page, page.get_by_role("button", name="End split"), "done")
    page.get_by_role("button", name="Split ...").click()
    page.get_by_role("dialog").get_by_label(f"policy@{newest}").fill("3")
    page.get_by_role("dialog").get_by_label(f"policy@{older}").fill("1")
    page.get_by_role("dialog").get_by_role("button", name="Split").click()
    expect(serving).to_contain_text("75%")
    press(page, page.get_by_role("button", name="End split"), "done")
    row("Alias", older).click()
    page.get_by_role("dialog").get_by_label("Alias").fill("liked")
    page.get_by_role("dialog").get_by_role("button", name="Set it").click()
    expect(page.locator(".done")).to_contain_text(f"means policy@{older}")
    with page.expect_download() as download:
        row("Export", older).click()
    assert download.value.suggested_filename == f"policy@{older}.zip"
    assert Path(download.value.path()).read_bytes().startswith(b"PK")
    expect(row("Unload", newest)).to_be_disabled()
    press(page, row("Unload", older), "done")
    expect(row("Unload", older)).to_have_count(0)
    done = {row["kind"]: row for row in server.happenings if row["refused"] is None}
    assert {"promoted", "rolled_back", "split", "unsplit", "aliased", "unloaded"} <= done.keys()
    assert (done["promoted"]["by"], done["promoted"]["what"]) == ("admin", f"policy@{newest}")
    with server.client("training") as client:
        client.post("/v1/training/resume").raise_for_status()


def test_the_menu_changes_shares_clears_caches_and_aborts(server: Server, open_page: OpenPage) -> None:
    page = page_of(server, open_page, "admin", "overview", viewport={"width": 360, "height": 740})

    def choose(name: str) -> None:
        page.locator("#actions").get_by_role("button", name="Actions", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name=name).click()

    def answer(action: str, said: str) -> None:
        # the menu below has a button of this name, too, which is not dangerous
        page.locator("dialog[open] button.danger").filter(has_text=action).click()
        expect(page.locator(".done p")).to_contain_text(said, timeout=20_000)
        for dialog in page.get_by_role("dialog").all():
            dialog.get_by_role("button", name="Close").click()

    expect(bar(page, "Pause")).to_be_hidden()  # on a phone all acts are in the menu
    choose("Shares")
    page.get_by_label("Serving, of the engine's share").fill("0.6")
    page.get_by_role("button", name="Next").click()
    answer("Shares", '"serving_share":0.6')
    choose("Clear caches")
    answer("Clear caches", "done")
    choose("Abort a request")
    page.get_by_label("Id of the request").fill("nobody")
    page.get_by_role("button", name="Next").click()
    answer("Abort a request", "0 ended")


def test_training_is_stopped_and_its_versions_are_served_on(server: Server, open_page: OpenPage) -> None:
    page = page_of(server, open_page, "training", "overview")
    press(page, bar(page, "Stop"), r"after step \d+; its versions are served on")
    for name in BAR:
        expect(bar(page, name)).to_be_disabled()
        expect(bar(page, name)).to_have_attribute("title", "training has ended")
    with server.client("inference") as client:
        answer = client.post("/v1/completions", json={"model": "policy", "prompt": "2", "max_tokens": 2})
        assert answer.json()["model"].startswith("policy@")
