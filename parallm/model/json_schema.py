"""JSON schemas of clients as llguidance enforces them: with bounds on what else a model could write without end."""

import json
from collections.abc import Mapping
from typing import Any

WHITESPACE = r"[\x20\x0A]"
"""Between two tokens of JSON, once at most. Given more room, small models fill it until their tokens are used up; given
none, they do not find the end of a number, which they are used to see in a space or a line end."""
LARGEST_INTEGER = 2**53 - 1
"""The largest integer that all readers of JSON agree on (RFC 8259)."""
OPTIONS = "x-guidance"
BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords that hold schemas by name."""
SCHEMAS = {"items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf"}
"""Keywords that hold a schema, or a list of some."""
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
VALUES = {"enum", "const"}


def enforceable(schema: Any, whitespace: str | None) -> str:
    """The schema as JSON, with llguidance's options at its top level; those that it has already count more.

    `whitespace` is that of `GrammarSource`. Integers get the bounds of `LARGEST_INTEGER` where they have none.
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
    """Each integer with bounds. What is no schema, such as the values of `enum`, stays as it is."""
    if isinstance(schema, list):
        return [_bounded(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {keyword: _bounded_keyword(keyword, value) for keyword, value in schema.items()}
    return found | (_missing_bounds(schema) if _is_integer(schema.get("type")) and not VALUES & schema.keys() else {})


def _bounded_keyword(keyword: str, value: Any) -> Any:
    if keyword in BY_NAME and isinstance(value, dict):
        return {name: _bounded(one) for name, one in value.items()}
    return _bounded(value) if keyword in SCHEMAS else value


def _is_integer(kind: Any) -> bool:
    """Bounds of an integer would be bounds of a number, too, where both are allowed."""
    return kind == "integer" or (isinstance(kind, list) and "integer" in kind and "number" not in kind)


def _missing_bounds(schema: Mapping[str, Any]) -> dict[str, int]:
    """None where a given bound lies outside of the usual ones: together they could allow nothing."""
    given = [schema[name] for name in BOUNDS & schema.keys()]
    if any(not isinstance(bound, int | float) or abs(bound) > LARGEST_INTEGER for bound in given):
        return {}
    low = {} if {"minimum", "exclusiveMinimum"} & schema.keys() else {"minimum": -LARGEST_INTEGER}
    high = {} if {"maximum", "exclusiveMaximum"} & schema.keys() else {"maximum": LARGEST_INTEGER}
    return low | high
