"""`/docs`: the OpenAPI document as one page of HTML that needs nothing from elsewhere, no scripts and no network."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from parallm.server.reference.document import FORM

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
pre, code { font: 13px/1.4 ui-monospace, monospace; background: #f4f4f4 }
pre { padding: .7rem; overflow-x: auto } code { padding: .1rem .2rem }
summary { cursor: pointer; padding: .3rem 0 } summary code { font-weight: bold }
details { border-bottom: 1px solid #ddd } details > *:not(summary) { margin-left: 1rem }
td, th { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0 }
h3 { font-size: 1rem; margin: .8rem 0 .2rem }
"""
ROLES = ("public", "inference", "training", "admin")
JSON = "application/json"


def docs_page(document: Mapping[str, Any]) -> str:
    """Every route by role, closed until it is opened; `document` is OpenAPI's."""
    info = document["info"]
    paragraphs = "".join(f"<p>{_marked(text)}</p>" for text in info["description"].strip().split("\n\n"))
    sections = "".join(_section(role, document) for role in ROLES)
    title = escape(f"{info['title']} {info['version']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>{paragraphs}"
        f'<p>For programs: <a href="/openapi.json">/openapi.json</a>. '
        f'With buttons to try, from a CDN: <a href="/docs/try">/docs/try</a>.</p>{sections}</body></html>'
    )


def _section(role: str, document: Mapping[str, Any]) -> str:
    routes = [
        _route(method, path, operation, document["components"]["schemas"])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if operation["tags"] == [role]
    ]
    return f"<h2>{escape(role)}</h2>{''.join(routes)}"


def _route(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    asked = operation.get("requestBody", {}).get("content", {})
    first_line = operation["description"].partition("\n")[0]
    parts = [
        f"<details><summary><code>{method.upper()} {escape(path)}</code> {_marked(first_line)}</summary>",
        _parameters(operation.get("parameters", ())),
        *(_example(method, path, name, body) for name, body in _bodies(asked)),
        *(_fields(schemas[name], name) for name in _names(asked.get(JSON, {}).get("schema", {}))),
        *(_answer(kind, told) for kind, told in operation["responses"]["200"]["content"].items()),
        _errors(operation["responses"]),
        "</details>",
    ]
    return "".join(parts)


def _parameters(parameters: Any) -> str:
    rows = [
        f"<tr><td><code>{escape(one['name'])}</code></td><td>{escape(one['in'])}</td>"
        f"<td>{_marked(one.get('description', ''))} {escape(', '.join(one['schema'].get('enum', ())))}</td></tr>"
        for one in parameters
    ]
    return f"<h3>Parameters</h3><table>{''.join(rows)}</table>" if rows else ""


def _bodies(asked: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """By name; None stands for a file."""
    for kind, content in asked.items():
        if kind != JSON:
            yield kind, None
        elif "examples" in content:
            yield from ((name, one["value"]) for name, one in content["examples"].items())
        else:
            yield "body", content["example"]


def _example(method: str, path: str, name: str, body: Any) -> str:
    file = "-F file=@FILE" if name == FORM else "--data-binary @FILE"
    data = file if body is None else f"-d '{json.dumps(body)}'"
    return f"<h3>{escape(name)}</h3><pre>curl -X {method.upper()} $URL{escape(path)} {escape(data)}</pre>"


def _fields(schema: Mapping[str, Any], name: str) -> str:
    needed = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(field)}</code>{' (required)' if field in needed else ''}</td>"
        f"<td>{_marked(one.get('description', ''))}</td><td>{_default(one)}</td></tr>"
        for field, one in schema.get("properties", {}).items()
    ]
    return f"<h3>Fields of {escape(name)}</h3><table>{''.join(rows)}</table>" if rows else ""


def _default(field: Mapping[str, Any]) -> str:
    return f"usually <code>{escape(json.dumps(field['default']))}</code>" if "default" in field else ""


def _answer(kind: str, told: Mapping[str, Any]) -> str:
    shown = told.get("example", told["schema"].get("description", ""))
    text = shown if isinstance(shown, str) else json.dumps(shown, indent=2)
    return f"<h3>Answer: {escape(kind)}</h3><pre>{escape(text)}</pre>"


def _errors(responses: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td>{status}</td><td>{_marked(told['description'])}</td></tr>"
        for status, told in responses.items()
        if status != "200"
    ]
    return f"<h3>Errors</h3><table>{''.join(rows)}</table>"


def _names(schema: Mapping[str, Any]) -> list[str]:
    refs = schema.get("anyOf", [schema] if schema else [])
    return [one["$ref"].rpartition("/")[2] for one in refs if "$ref" in one]


def _marked(text: str) -> str:
    """Text with `code` and **strong** of Markdown."""
    parts = escape(text).split("`")
    coded = "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))
    strong = coded.split("**")
    return "".join(f"<b>{part}</b>" if place % 2 else part for place, part in enumerate(strong))
