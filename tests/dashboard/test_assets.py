"""The page's files: what browsers get, how long they keep it, and what no answer below `/dashboard` lacks."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from parallm.server.dashboard import routes_page
from parallm.server.dashboard.assets import HEADERS, PLOTLY, Assets, lean, plotly_script
from parallm.server.settings import ServerSettings
from tests.server.conftest import CharacterTokenizer, EchoEngine, make_app, send_to

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8", "Accept-Encoding": "identity"}
INDEX = '<!doctype html><link rel="stylesheet" href="{digest}/style.css"><script src="{digest}/views/app.js"></script>'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    page = tmp_path / "page"
    (page / "views").mkdir(parents=True)
    (page / "index.html").write_text(INDEX)
    (page / "style.css").write_text("body { margin: 0 }")
    (page / "views" / "app.js").write_text("export const answer = 42;\n" * 100)
    (page / "notes.txt").write_text("not of the page")
    (tmp_path / "secret.js").write_text("beside the page")
    monkeypatch.setattr(routes_page.page_routes, "__defaults__", (page,))
    return page


def make(**settings: Any) -> FastAPI:
    return make_app(EchoEngine(), CharacterTokenizer(), settings=ServerSettings(**settings))


@pytest.fixture
def get(folder: Path) -> Callable[..., httpx.Response]:
    app = make()
    return lambda path, headers=BROWSER: send_to(app, "GET", path, headers=headers)


def test_the_page_names_its_files_below_the_digest(get: Callable[..., httpx.Response], folder: Path) -> None:
    digest = Assets(folder).digest
    index = get("/dashboard/")
    assert (index.status_code, index.headers["cache-control"]) == (200, "no-cache")
    assert index.text == INDEX.replace("{digest}", digest)
    script = get(f"/dashboard/{digest}/views/app.js")
    assert script.content == lean("app.js", (folder / "views" / "app.js").read_bytes())
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "immutable" in script.headers["cache-control"]


def test_files_are_compressed_for_those_who_take_it(get: Callable[..., httpx.Response], folder: Path) -> None:
    path = f"/dashboard/{Assets(folder).digest}/views/app.js"
    plain, packed = get(path), get(path, {"Accept-Encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < len(plain.content) / 10
    assert packed.content == plain.content
    assert plain.headers["vary"] == packed.headers["vary"] == "Accept-Encoding"


def test_another_file_changes_the_digest_and_an_old_page_is_told(folder: Path) -> None:
    before = Assets(folder).digest
    (folder / "style.css").write_text("body { margin: 1px }")
    assert Assets(folder).digest != before
    stale = send_to(make(), "GET", f"/dashboard/{before}/style.css")
    assert stale.status_code == 404
    assert "the page has changed; load it again" in stale.json()["error"]["message"]


@pytest.mark.parametrize("path", ["../secret.js", "..%2fsecret.js", "views/../../secret.js", "notes.txt", "views", ""])
def test_nothing_but_the_pages_files_is_served(get: Callable[..., httpx.Response], folder: Path, path: str) -> None:
    answer = get(f"/dashboard/{Assets(folder).digest}/{path}")
    assert answer.status_code == 404
    assert "beside the page" not in answer.text


def test_every_answer_below_the_page_has_the_headers(get: Callable[..., httpx.Response], folder: Path) -> None:
    digest = Assets(folder).digest
    paths = ["/dashboard", "/dashboard/", f"/dashboard/{digest}/style.css", f"/dashboard/{digest}/no", "/dashboard/no"]
    for path in paths:
        answer = get(path)
        assert {name: answer.headers.get(name) for name in HEADERS} == dict(HEADERS), path
    foreign = get("/dashboard/", {"Host": "evil.example"})
    assert foreign.status_code == 403
    assert foreign.headers["x-content-type-options"] == "nosniff"
    assert "content-security-policy" not in get("/health").headers


def test_no_directive_allows_inline_code_or_another_host() -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    for loose in ("unsafe-inline", "unsafe-eval", "http:", "https:", "*"):
        assert loose not in policy


def test_browsers_are_led_to_the_page_and_programs_are_not(get: Callable[..., httpx.Response]) -> None:
    led = get("/")
    assert (led.status_code, led.headers["location"]) == (307, "dashboard/")
    assert get("/dashboard").headers["location"] == "dashboard/"
    assert get("/", {"Accept": "*/*"}).json()["server"] == "ParaLLM"


def test_with_ollama_the_root_is_still_its_own_for_programs(folder: Path) -> None:
    app = make(ollama=True)
    assert send_to(app, "GET", "/", headers=BROWSER).headers["location"] == "dashboard/"
    assert send_to(app, "GET", "/", headers={"Accept": "*/*"}).text == "Ollama is running"


def test_without_the_dashboard_there_is_no_page(folder: Path) -> None:
    app = make(dashboard=False)
    assert send_to(app, "GET", "/dashboard/").status_code == 404
    assert send_to(app, "GET", "/", headers=BROWSER).status_code == 404


@pytest.mark.skipif(plotly_script() is None, reason="plotly is not installed")
def test_plotly_comes_from_the_installed_package(folder: Path) -> None:
    assets = Assets(folder)
    assert assets.is_large(PLOTLY)
    found = assets.find(PLOTLY)
    script = plotly_script()
    assert found is not None
    assert script is not None
    assert found.content == script.read_bytes()
    assert gzip.decompress(found.compressed) == found.content
    assert PLOTLY not in assets.names
