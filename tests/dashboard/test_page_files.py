"""The page's files as they stand: no sink for HTML, no foreign address, every import there, small."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parallm.server.dashboard.assets import Assets, lean
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


def test_the_page_is_small(record_property: Callable[[str, object], None]) -> None:
    num_bytes = Assets(PAGE).num_bytes
    record_property("dashboard.page_bytes", num_bytes)
    assert num_bytes <= MAX_BYTES


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_template_stands_in_another(path: Path) -> None:
    """The library that takes spaces out of scripts would take them out of the outer one's text."""
    assert re.findall(r"\$\{[^}`]*`", path.read_text()) == []


def test_what_travels_says_the_same() -> None:
    script = b'// what it is\n/** Return\n\nmore. */\nexport const b = (x) => {\n  return "// " + x; // why\n};\n'
    assert lean("b.js", script) == b'export const b=(x)=>{return"// "+x;};'
    assert lean("a.js", b"const text = `a  // b\n  ${c}`;") == b"const text=`a  // b\n  ${c}`;"
    style = b"/* shell */\n.a, .b > c { color: red; }\n@media (max-width: 640px) {\n  a:hover { margin: 0 1px; }\n}\n"
    assert lean("b.css", style) == b".a,.b>c{color:red}@media (max-width:640px){a:hover{margin:0 1px}}"
    assert lean("index.html", b"<p>  x </p>") == b"<p>  x </p>"
