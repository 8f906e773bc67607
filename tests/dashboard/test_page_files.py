"""The page's files as they stand: no sink for HTML, no foreign address, every import there, small."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboard.conftest import PAGE

MAX_BYTES = 160_000
BANNED = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "DOMParser",
    "createContextualFragment",
    "setHTML",
    "srcdoc",
    "eval(",
    "Function(",
    'setTimeout("',
    "javascript:",
    'setAttribute("on',
    'setAttribute("style',
    "style=",
    "document.cookie",
)
MAKES_ELEMENTS = {"element.js": ("createElement", "createElementNS"), "server.js": ("createElement",)}
OWN_NAMESPACE = ("http://www.w3.org/2000/svg",)
MODULES = sorted(PAGE.glob("*.js"))


def sinks_of(text: str) -> list[str]:
    return [word for word in BANNED if word in text]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_module_parses_text_as_a_document(path: Path) -> None:
    text = path.read_text()
    assert sinks_of(text) == []
    made = set(re.findall(r"createElement(?:NS)?", text))
    assert made <= set(MAKES_ELEMENTS.get(path.name, ()))


@pytest.mark.parametrize("sink", ["box.innerHTML = text", "new DOMParser()", 'link.href = "javascript:" + x'])
def test_a_sink_would_be_found(sink: str) -> None:
    assert sinks_of(sink)


def test_no_file_names_another_host() -> None:
    for path in [*PAGE.glob("*.*")]:
        found = re.findall(r"(?:https?:|wss?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s'\"`)]*", path.read_text())
        assert [url for url in found if not url.startswith(OWN_NAMESPACE)] == [], path.name


def imports_of(text: str) -> Iterator[str]:
    yield from re.findall(r'(?:from|import)\s*\(?\s*"\./([\w.]+)"', text)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_every_import_is_there(path: Path) -> None:
    there = {one.name for one in MODULES} | {"plotly.min.js"}
    assert set(imports_of(path.read_text())) <= there


def test_the_first_modules_are_loaded_at_once() -> None:
    """What app.js imports stands in index.html, so that the browser asks for all of it in one go."""
    index, needed, left = (PAGE / "index.html").read_text(), {"app.js"}, ["app.js"]
    while left:
        text = (PAGE / left.pop()).read_text()
        found = set(re.findall(r'^import .*from "\./([\w.]+)"', text, re.MULTILINE)) - needed
        needed |= found
        left += found
    preloaded = set(re.findall(r'modulepreload" href="\{digest\}/([\w.]+)"', index))
    assert preloaded >= needed - {"app.js"}
    assert {path.name for path in MODULES} >= preloaded


def test_the_page_is_small() -> None:
    num_bytes = sum(path.stat().st_size for path in PAGE.rglob("*") if path.is_file())
    assert num_bytes <= MAX_BYTES
