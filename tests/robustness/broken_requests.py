"""Requests over every route of an OpenAPI document, valid and broken in every part, as bytes for a socket.

Broken are bodies, in every way that we know, paths, queries, headers, methods, and HTTP itself.
"""

import json
import random
import re
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
BAD_BYTES = (b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\x00", b"\xef\xbb\xbf", b"\xfe\xff")
DEPTHS = (100, 5000, 100_000)
Example = Mapping[str, Any]
"""A body that works."""
SHARES = {"valid": 12, "body": 38, "path": 12, "query": 8, "header": 18, "method": 5, "wire": 7}
"""Percentages of the requests in which each part is the broken one."""
WAITING = {
    "POST /v1/training/update",
    "POST /v1/training/checkpoint",
    "POST /training/checkpoint",
    "POST /v1/warmup",
    "POST /pause",
    "POST /pause_generation",
    "POST /areal_pause_generation",
}
"""Routes that answer when something has happened: these requests have a deadline."""
DEADLINE = ("x-request-timeout", "0.2")
NAMES = (
    *("poet", "policy", "base", "policy@1", "poet@1", "poet@-1", "policy@99999999999999999999", "@", "policy@", "best"),
    *("", ".", "..", "%2e%2e%2f%2e%2e", "a/b", "%00", "%ff", "%0d%0aset-cookie:a=b", "*", "{name}", "%F0%9F%98%80"),
    *("a" * 300, "a" * 6000, "'\"<script>", "cmpl-1-0", "%25", "+", "a%20b"),
)
PATHS = ("{}/", "{}//", "/{}", "{}%00", "{}/..", "{}.json", "{};a=b", "{}#a")
VALUES = (
    *("", "0", "1", "-1", "true", "nan", "inf", "1e400", "9" * 400, "poet", "abort", "keep", "wait", "[]", "%00"),
    *("%ff", "a" * 3000, "../..", "&&&", "=", "%F0%9F%98%80"),
)
HEADERS: Mapping[str, tuple[str, ...]] = {
    "host": ("evil.example", "", "127.0.0.1", "[::1]", "[", "localhost:99999", "a" * 500, "localhost, localhost"),
    "origin": ("http://[", "http://[::1", "null", "", "https://evil.example", "http://localhost", "//", "\x80"),
    "sec-fetch-site": ("cross-site", "same-site", "same-origin", "none", "", "x"),
    "referer": ("http://[", "https://evil.example", ""),
    "content-type": ("", "text/plain", "multipart/form-data", "multipart/form-data; boundary=", "a/b; c=x", "\xff"),
    "accept": ("", "*/*", "application/openmetrics-text", "text/event-stream", "q=;;,", "a" * 5000),
    "authorization": ("Bearer", "Bearer \xff", "Basic YTpi", "Bearer " + "a" * 5000, ""),
    "x-api-key": ("", "\xe4", "a" * 5000),
    "x-request-id": ("", "a" * 129, "\xff", "a b", "1#0"),
    "x-request-timeout": ("", "0", "-1", "nan", "inf", "1e400", "0.001", "1e-400", "1e9", "9" * 400, "\xff"),
    "traceparent": ("", "00-0-0-0", "\xff", "00-" + "f" * 32 + "-" + "f" * 16 + "-ff"),
    "expect": ("100-continue", "x"),
    "connection": ("close", "upgrade", "keep-alive, upgrade", ""),
    "upgrade": ("websocket", "h2c"),
    "content-encoding": ("gzip", "br", "\xff"),
    "accept-encoding": ("gzip;q=x", "identity;q=0"),
    "range": ("bytes=0-", "bytes=9-1", "x"),
    "if-none-match": ("*", '"'),
    "cookie": ("a=b; " * 500,),
    "x-forwarded-host": ("evil.example",),
    "x-forwarded-for": ("127.0.0.1, \xff",),
    "x-http-method-override": ("DELETE",),
}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "A" * 300)
WIRE = (
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: \x00\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 2000 + b"\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 100_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{}",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n{}\r\n0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2;" + b"a" * 9000 + b"\r\n{}\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /health HTTP/1.1\nHost: localhost\n\n",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    queries: tuple[str, ...]
    examples: tuple[Mapping[str, Any], ...]
    """Bodies that work; none for a route that takes no JSON."""
    media_type: str

    @property
    def row(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request."""

    row: str
    kind: str
    content: bytes
    has_deadline: bool = False
    """504 is an answer that it asks for."""

    @property
    def is_http(self) -> bool:
        return self.kind != "wire"


def operations_of(document: Mapping[str, Any]) -> list[Operation]:
    found = []
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            content = described.get("requestBody", {}).get("content", {})
            shown = content.get(JSON, {})
            named = [one["value"] for one in shown.get("examples", {}).values()]
            found.append(
                Operation(
                    method=method.upper(),
                    path=path,
                    queries=tuple(one["name"] for one in described.get("parameters", ()) if one["in"] == "query"),
                    examples=tuple(named or ([shown["example"]] if "example" in shown else [])),
                    media_type=next(iter(content), JSON),
                )
            )
    return found


def requests_over(operations: list[Operation], archives: list[bytes], number: int, seed: int) -> Iterator[Sent]:
    """Each route in turn, so that all have the same number; what is broken and how is drawn.

    `archives` are adapters: bodies that work for the routes which take one.
    """
    source = random.Random(seed)
    kinds, shares = list(SHARES), list(SHARES.values())
    for place in range(number):
        operation = operations[place % len(operations)]
        (kind,) = source.choices(kinds, shares)
        yield MAKERS[kind](source, operation, archives)


def valid(source: random.Random, operation: Operation, archives: list[bytes]) -> Sent:
    return sent("valid", operation, path_of(operation), body=good_body(source, operation, archives))


def broken_body(source: random.Random, operation: Operation, archives: list[bytes]) -> Sent:
    kind = source.choice(list(KINDS))
    example = source.choice(operation.examples) if operation.examples else {}
    content = KINDS[kind](source, example)
    return sent(kind, operation, path_of(operation), body=content)


def broken_path(source: random.Random, operation: Operation, archives: list[bytes]) -> Sent:
    path = re.sub(r"\{\w+\}", lambda _: source.choice(NAMES), operation.path)
    if path == operation.path:
        path = source.choice(PATHS).format(path)
    # an adapter under each of these names would fill the memory, which is what is measured
    return sent("path", operation, path, body=good_body(source, operation, []))


def broken_query(source: random.Random, operation: Operation, archives: list[bytes]) -> Sent:
    names = [*operation.queries, "x", "mode", ""]
    pairs = [f"{source.choice(names)}={source.choice(VALUES)}" for _ in range(source.randrange(1, 4))]
    path = f"{path_of(operation).partition('?')[0]}?{'&'.join(pairs)}"
    return sent("query", operation, path, body=good_body(source, operation, []))


def broken_header(source: random.Random, operation: Operation, archives: list[bytes]) -> Sent:
    chosen = {name: source.choice(HEADERS[name]) for name in source.sample(list(HEADERS), source.randrange(1, 4))}
    body = good_body(source, operation, archives)
    return sent("header", operation, path_of(operation), body=body, headers=chosen)


def broken_method(source: random.Random, operation: Operation, archives: list[bytes]) -> Sent:
    method = source.choice(METHODS)
    return sent("method", operation, path_of(operation), body=good_body(source, operation, []), method=method)


def no_http(source: random.Random, operation: Operation, archives: list[bytes]) -> Sent:
    content = source.choice((*WIRE, source.randbytes(source.randrange(1, 3000))))
    return Sent(row="none", kind="wire", content=content)


MAKERS: Mapping[str, Callable[[random.Random, Operation, list[bytes]], Sent]] = {
    "valid": valid,
    "body": broken_body,
    "path": broken_path,
    "query": broken_query,
    "header": broken_header,
    "method": broken_method,
    "wire": no_http,
}


def sent(
    kind: str,
    operation: Operation,
    path: str,
    *,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
) -> Sent:
    usual = {"host": "localhost", "content-type": operation.media_type, "content-length": str(len(body))}
    if operation.row in WAITING:
        usual |= dict([DEADLINE])
    given = usual | dict(headers or {})
    lines = [f"{method or operation.method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return Sent(
        row=operation.row,
        kind=kind,
        content="\r\n".join([*lines, "", ""]).encode("latin-1") + body,
        has_deadline=DEADLINE[0] in given,
    )


def good_body(source: random.Random, operation: Operation, archives: list[bytes]) -> bytes:
    """One that works, as far as that is possible without looking at what is there."""
    if operation.examples:
        return json.dumps(source.choice(operation.examples)).encode()
    if operation.media_type != JSON:
        return source.choice(archives) if archives else source.randbytes(200)
    return b""


def path_of(operation: Operation) -> str:
    path = re.sub(r"\{\w+\}", "poet", operation.path)
    return f"{path}?name=poet" if "name" in operation.queries else path


# bodies -------------------------------------------------------------------------------------------------------------


def truncated(source: random.Random, example: Example) -> bytes:
    whole = text_of(example)
    return whole[: source.randrange(len(whole))]


def wrong_types(source: random.Random, example: Example) -> bytes:
    body = dict(example) | {source.choice([*example, "x"]): source.choice(OTHER_VALUES)}
    return text_of(body if source.random() < 0.9 else source.choice(OTHER_VALUES))


def wrong_inside(source: random.Random, example: Example) -> bytes:
    """A wrong value at a random depth."""
    body = json.loads(text_of(example))
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


def huge_number(source: random.Random, example: Example) -> bytes:
    return with_literal(source, example, source.choice(HUGE))


def no_number(source: random.Random, example: Example) -> bytes:
    return with_literal(source, example, source.choice(NOT_NUMBERS))


def deep(source: random.Random, example: Example) -> bytes:
    depth = source.choice(DEPTHS)
    opening, closing = source.choice((("[", "]"), ('{"a":', "}")))
    return with_literal(source, example, opening * depth + "1" + closing * depth * source.randrange(2))


def bad_bytes(source: random.Random, example: Example) -> bytes:
    whole = text_of(example)
    place = source.randrange(len(whole))
    return whole[:place] + source.choice(BAD_BYTES) + whole[place:]


def same_key_twice(source: random.Random, example: Example) -> bytes:
    key = source.choice([*example, "model"])
    return b"{" + f"{json.dumps(key)}: {json.dumps(source.choice(OTHER_VALUES))}, ".encode() + text_of(example)[1:]


def noise(source: random.Random, example: Example) -> bytes:
    return source.randbytes(source.randrange(2000))


KINDS: Mapping[str, Callable[[random.Random, Example], bytes]] = {
    "truncated": truncated,
    "wrong type": wrong_types,
    "wrong type inside": wrong_inside,
    "huge number": huge_number,
    "no number": no_number,
    "deep nesting": deep,
    "invalid UTF-8": bad_bytes,
    "duplicate keys": same_key_twice,
    "noise": noise,
}


def with_literal(source: random.Random, example: Example, literal: str) -> bytes:
    """The example with `literal`, which need not be JSON, as one of its values."""
    key = source.choice([*example, "seed"])
    return text_of(dict(example) | {key: "@literal@"}).replace(b'"@literal@"', literal.encode())


def text_of(value: object) -> bytes:
    return json.dumps(value).encode()
