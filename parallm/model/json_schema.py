"""JSON schemas of clients for llguidance, with bounds on white space and integers, which models repeat without end."""

import json
from collections.abc import Mapping
from typing import Any

WHITESPACE = r"[\x20\x0A]"
"""White space allowed between two tokens of JSON, at most once. Small models fill more room until their tokens are used
up. Without any they do not end a number, since they learned to end it by a space or a line end."""
MAX_INTEGER = 2**53 - 1
"""The largest integer that all readers of JSON agree on (RFC 8259)."""
OPTIONS = "x-guidance"
BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords that hold schemas by name."""
SCHEMAS = {"items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf"}
"""Keywords that hold a schema, or a list of some."""
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
VALUES = {"enum", "const"}


def enforceable(schema: Any, whitespace: str | None) -> str:
    """Return the schema as JSON, with llguidance's options at its top level; the schema's own options win.

    `whitespace` is that of `GrammarSource`. Integers without bounds get those of `MAX_INTEGER`.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return json.dumps(schema)
    pattern = WHITESPACE if whitespace is None else whitespace
    usual = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    own = schema.get(OPTIONS, {})
    return json.dumps({**_bounded(schema), OPTIONS: {**usual, **own} if isinstance(own, dict) else own})


def _bounded(schema: Any) -> Any:
    """Return the schema with bounds for each integer. Values of `enum` and the like stay as they are."""
    if isinstance(schema, list):
        return [_bounded(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    bounded = {keyword: _bounded_keyword(keyword, value) for keyword, value in schema.items()}
    return bounded | (_missing_bounds(schema) if _is_integer(schema.get("type")) and not VALUES & schema.keys() else {})


def _bounded_keyword(keyword: str, value: Any) -> Any:
    if keyword in BY_NAME and isinstance(value, dict):
        return {name: _bounded(schema) for name, schema in value.items()}
    return _bounded(value) if keyword in SCHEMAS else value


def _is_integer(kind: Any) -> bool:
    """Return whether only integers are numbers here: bounds of an integer would bound a number, too."""
    return kind == "integer" or (isinstance(kind, list) and "integer" in kind and "number" not in kind)


def _missing_bounds(schema: Mapping[str, Any]) -> dict[str, int]:
    """Return no bounds where a given bound lies beyond `MAX_INTEGER`: together they could allow nothing."""
    given = [schema[name] for name in BOUNDS & schema.keys()]
    if any(not isinstance(bound, int | float) or abs(bound) > MAX_INTEGER for bound in given):
        return {}
    low = {} if {"minimum", "exclusiveMinimum"} & schema.keys() else {"minimum": -MAX_INTEGER}
    high = {} if {"maximum", "exclusiveMaximum"} & schema.keys() else {"maximum": MAX_INTEGER}
    return low | high
