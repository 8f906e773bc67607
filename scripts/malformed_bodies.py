"""Request bodies that are broken in every way that we know, made from the examples of an OpenAPI document."""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

JSON = "application/json"
HUGE = ("1e999", "-1e999", "9" * 400, "-" + "9" * 400, "1e-999", "9223372036854775808", "0." + "1" * 5000)
NOT_NUMBERS = ("NaN", "Infinity", "-Infinity", "nan", "0x10", "01", "+1", ".5")
OTHER_VALUES: tuple[object, ...] = (
    *(None, True, False, 0, -1, 2**31, 2**63, 1.5, "", "a", "\x00", "\ud800", "\u2028", "a" * 5000),
    *([], {}, [[]], [None], {"a": {}}, [1] * 300, ["a", 1], {"": None}),
)
CONTENT_TYPES = ("text/plain", "application/xml", "multipart/form-data; boundary=x", "application/json; charset=utf-7")
BAD_BYTES = (b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\x00", b"\xef\xbb\xbf", b"\xfe\xff")
DEPTHS = (100, 5000, 100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    method: str
    path: str
    example: Mapping[str, Any]
    """A body that works; empty for routes that take no JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    route: Route
    kind: str
    content: bytes
    content_type: str


def routes_of(document: Mapping[str, Any]) -> list[Route]:
    """The routes of an OpenAPI document that take bodies, once for each example."""
    found = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method in ("post", "put"):
                content = operation.get("requestBody", {}).get("content", {})
                shown = content.get(JSON, {})
                named = [one["value"] for one in shown.get("examples", {}).values()]
                for example in named or [shown.get("example", {})]:
                    found.append(Route(method=method.upper(), path=path, example=example))
    return found


def malformed_bodies(routes: list[Route], number: int, seed: int) -> Iterator[Malformed]:
    """The kinds take turns; the rest is drawn."""
    source = random.Random(seed)
    kinds = list(KINDS)
    for place in range(number):
        route, kind = source.choice(routes), kinds[place % len(kinds)]
        content_type = source.choice(CONTENT_TYPES) if kind == "wrong content type" else JSON
        yield Malformed(route=route, kind=kind, content=KINDS[kind](source, route), content_type=content_type)


def truncated(source: random.Random, route: Route) -> bytes:
    whole = text_of(route.example)
    return whole[: source.randrange(len(whole))]


def wrong_types(source: random.Random, route: Route) -> bytes:
    body = dict(route.example) | {source.choice([*route.example, "x"]): source.choice(OTHER_VALUES)}
    return text_of(body if source.random() < 0.9 else source.choice(OTHER_VALUES))


def wrong_inside(source: random.Random, route: Route) -> bytes:
    """A wrong value at a random depth."""
    body = json.loads(text_of(route.example))
    place: Any = body
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        if not keys:
            return text_of(body)
        key = source.choice(keys)
        if source.random() < 0.4 or not isinstance(place[key], dict | list):
            place[key] = source.choice(OTHER_VALUES)
            return text_of(body)
        place = place[key]


def huge_number(source: random.Random, route: Route) -> bytes:
    return with_literal(source, route, source.choice(HUGE))


def no_number(source: random.Random, route: Route) -> bytes:
    return with_literal(source, route, source.choice(NOT_NUMBERS))


def deep(source: random.Random, route: Route) -> bytes:
    depth = source.choice(DEPTHS)
    opening, closing = source.choice((("[", "]"), ('{"a":', "}")))
    return with_literal(source, route, opening * depth + "1" + closing * depth * source.randrange(2))


def bad_bytes(source: random.Random, route: Route) -> bytes:
    whole = text_of(route.example)
    place = source.randrange(len(whole))
    return whole[:place] + source.choice(BAD_BYTES) + whole[place:]


def same_key_twice(source: random.Random, route: Route) -> bytes:
    key = source.choice([*route.example, "model"])
    return (
        b"{" + f"{json.dumps(key)}: {json.dumps(source.choice(OTHER_VALUES))}, ".encode() + text_of(route.example)[1:]
    )


def good(source: random.Random, route: Route) -> bytes:
    return text_of(route.example)


def noise(source: random.Random, route: Route) -> bytes:
    return source.randbytes(source.randrange(2000))


KINDS: Mapping[str, Callable[[random.Random, Route], bytes]] = {
    "truncated": truncated,
    "wrong type": wrong_types,
    "wrong type inside": wrong_inside,
    "huge number": huge_number,
    "no number": no_number,
    "deep nesting": deep,
    "invalid UTF-8": bad_bytes,
    "duplicate keys": same_key_twice,
    "wrong content type": good,
    "noise": noise,
}


def with_literal(source: random.Random, route: Route, literal: str) -> bytes:
    """The example with `literal`, which need not be JSON, as one of its values."""
    key = source.choice([*route.example, "seed"])
    return text_of(dict(route.example) | {key: "@literal@"}).replace(b'"@literal@"', literal.encode())


def text_of(value: object) -> bytes:
    return json.dumps(value).encode()
