"""What hostile clients, pages and uploads try against one server of this machine, and how each must be refused.

Prints the number of attacks and what was not refused as it must be. It runs in a process of its own, so that nothing of
this counts as the server's time.
"""

import asyncio
import io
import json
import resource
import struct
import sys
import time
import zipfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

MB = 1 << 20
LONG = 4 * MB - 1000
TIMEOUT = 60.0
SECONDS_TO_REFUSE = 15.0
SECONDS_CLOSED = 10.0
SECONDS_TO_SCORE = 10.0
BLOCKED = 20
SHOWN = 5
"""Failures that are shown of one attack."""
CHAT = [{"role": "user", "content": "2 + 2?"}]
HALVES = (
    b"",
    b"GET /health HTTP/1.1\r\nHost: loc",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{",
)


@dataclass(slots=True)
class Field:
    """One server, and the failures found on it."""

    client: httpx.AsyncClient
    port: int
    archive: bytes
    """A good adapter."""
    sockets: int
    failures: list[str]

    async def expect(self, name: str, status: int, method: str, path: str, **sent: Any) -> httpx.Response | None:
        """Send one request, which must get this status in time."""
        began = time.perf_counter()
        try:
            answer = await self.client.request(method, path, **sent)
        except httpx.HTTPError as error:
            self.failures.append(f"{name}: {type(error).__name__} {error}")
            return None
        seconds = time.perf_counter() - began
        if answer.status_code != status:
            self.failures.append(f"{name}: {answer.status_code} in place of {status}: {answer.text[:150]}")
        elif seconds > SECONDS_TO_REFUSE:
            self.failures.append(f"{name}: only after {seconds:.1f} s")
        return answer


async def long_texts(field: Field) -> None:
    for text in ("a", " ", "1", "\U0001f600"):
        many = text * (LONG // len(json.dumps(text)[1:-1]))
        body = json.dumps({"model": "base", "prompt": many})
        await field.expect(f"{len(many)} times {text!r}", 400, "POST", "/v1/completions", content=body)
    strings = {"prompt": "a" * LONG, "return_token_strs": True}
    await field.expect("4 MB to tokenize", 400, "POST", "/tokenize", json=strings)
    for messages in ([{"role": "user", "content": "a" * LONG}], CHAT * 100_000):
        body = {"model": "base", "messages": messages}
        await field.expect(f"{len(messages)} messages", 400, "POST", "/v1/chat/completions", json=body)
    both = [{"model": "base", "prompt": "a" * LONG}] * 6
    sent = (field.expect("4 MB, six at once", 400, "POST", "/v1/completions", json=one) for one in both)
    await asyncio.gather(*sent)


async def deep_json(field: Field) -> None:
    for depth in (100, 10_000, 1_000_000):
        nested = '{"model": "base", "prompt": ' + "[" * depth + "]" * depth + "}"
        await field.expect(f"{depth} levels", 400, "POST", "/v1/completions", content=nested)
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": "[" * 100_000}}
    body = {"model": "base", "messages": [{"role": "assistant", "tool_calls": [call]}]}
    await field.expect("arguments of 100,000 levels", 400, "POST", "/v1/chat/completions", json=body)


async def pages(field: Field) -> None:
    reads = ("/v1/models", "/v1/adapters", "/v1/training/status", "/metrics", "/health")
    for path in (*reads, "/flush_cache", "/health_generate"):
        for headers in (
            {"Host": "evil.example"},
            {"Origin": "https://evil.example"},
            {"Origin": "http://["},
            {"Sec-Fetch-Site": "cross-site"},
        ):
            await field.expect(f"GET {path} with {headers}", 403, "GET", path, headers=headers)


async def rewards(field: Field) -> None:
    """Nine in a row ended a run."""
    for place in range(12):
        asked = {"model": "live", "messages": CHAT, "n": 2, "max_tokens": 8, "collect_trajectory": True}
        answer = await field.expect("a completion to reward", 200, "POST", "/v1/chat/completions", json=asked)
        for choice in [] if answer is None or answer.is_error else answer.json()["choices"]:
            for reward in ("1e39", "-1e308", '{"a": 1e39}', "NaN", "1e999"):
                path = f"/v1/trajectories/{choice['trajectory_id']}/reward"
                await field.expect(f"a reward of {reward}", 400, "POST", path, content=f'{{"reward": {reward}}}')
            await field.expect("an honest reward", 200, "POST", path, json={"reward": place % 2 + choice["index"]})


async def scales(field: Field) -> None:
    changes: dict[str, Mapping[str, Any]] = {
        "alpha 1e40": {"lora_alpha": 1e40},  # over its rank still more than float32 can hold
        "alpha 1e308": {"lora_alpha": 1e308},
        "alpha 1e999": {"lora_alpha": float("inf")},
        "alpha of a pattern null": {"alpha_pattern": {"q_proj": None}},
    }
    for name, change in changes.items():
        await _upload(field, name, changed(field.archive, change))
    await _upload(field, "weights of 3e38", with_weights(field.archive, 3e38))
    await field.expect("an adapter called best", 400, "PUT", "/v1/adapters/best", content=field.archive)
    await field.expect("all adapters", 200, "GET", "/v1/adapters")


async def patterns(field: Field) -> None:
    for pattern in ("(a+)+b", "(?:a|aa)+$" * 5, "(x?)?" * 50):
        await _upload(field, f"pattern {pattern[:20]}", changed(field.archive, {"rank_pattern": {pattern: 16}}))


async def _upload(field: Field, name: str, archive: bytes) -> None:
    """Upload an adapter, and ask it beside the honest ones if it is taken all the same."""
    answer = await field.expect(name, 400, "PUT", "/v1/adapters/evil", content=archive)
    if answer is not None and not answer.is_error:
        body = {"model": "evil", "messages": CHAT, "n": 4, "max_tokens": 32}
        with suppress(httpx.HTTPError):
            await field.client.post("/v1/chat/completions", json=body)


async def scoring(field: Field) -> None:
    """Functions that block must not keep others from being scored."""
    asked = {"model": "live", "messages": CHAT, "max_tokens": 4, "collect_trajectory": True}
    blocking = [asked | {"scoring_function": "blocks"}] * BLOCKED
    sent = (field.expect("a blocked score", 200, "POST", "/v1/chat/completions", json=one) for one in blocking)
    await asyncio.gather(*sent)
    before = await scored(field)
    good = asked | {"scoring_function": "scores"}
    await field.expect("a good score", 200, "POST", "/v1/chat/completions", json=good)
    began = time.perf_counter()
    while await scored(field) <= before:
        if time.perf_counter() - began > SECONDS_TO_SCORE:
            field.failures.append(f"a good score waits for blocked ones for more than {SECONDS_TO_SCORE:.0f} s")
            return
        await asyncio.sleep(0.1)


async def scored(field: Field) -> int:
    """How many completions have got a reward so far."""
    with suppress(httpx.HTTPError):
        report = (await field.client.get("/v1/trajectories")).json()["data"]["live"]
        return int(report["num_rewarded"]) + int(report["num_trained"])
    return 0


async def grammars(field: Field) -> None:
    for regex in ("(a|b){900}(c|d){900}", "((a{1,30}){1,30}){1,30}", "(" * 300 + "a" + ")" * 300):
        body = {"model": "base", "prompt": "a", "max_tokens": 2, "guided_regex": regex}
        with suppress(httpx.HTTPError):
            answer = await field.client.post("/v1/completions", json=body)
            if answer.status_code not in (200, 400):
                field.failures.append(f"grammar {regex[:20]}: {answer.status_code}")


ATTACKS: Mapping[str, Callable[[Field], Awaitable[None]]] = {
    "long texts": long_texts,
    "deep JSON": deep_json,
    "foreign pages": pages,
    "grammars": grammars,
    "rewards": rewards,
    "scales": scales,
    "blocked scoring": scoring,
    "patterns": patterns,
}
"""The last one used to end everything."""


async def hold_half_open(field: Field, is_over: asyncio.Event) -> int:
    """Keep connections half open, after a while a new one for each that is closed. Returns how many were closed."""
    num_closed = 0

    async def one(half: bytes) -> None:
        nonlocal num_closed
        while not is_over.is_set():
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", field.port)
                writer.write(half)
                await asyncio.wait({ended := asyncio.ensure_future(reader.read()), over}, return_when="FIRST_COMPLETED")
                num_closed += ended.done()
                ended.cancel()
                writer.close()
            except OSError:
                num_closed += 1
            await asyncio.wait({over}, timeout=SECONDS_CLOSED)

    over = asyncio.ensure_future(is_over.wait())
    await asyncio.gather(*(one(HALVES[place % len(HALVES)]) for place in range(field.sockets)), return_exceptions=True)
    return num_closed


def changed(archive: bytes, change: Mapping[str, Any]) -> bytes:
    """The adapter with another configuration."""
    files = members(archive)
    config = json.loads(files["adapter_config.json"]) | dict(change)
    return packed(files | {"adapter_config.json": json.dumps(config).replace("Infinity", "1e999").encode()})


def with_weights(archive: bytes, value: float) -> bytes:
    """The adapter with this number for all its float32 weights."""
    files = members(archive)
    (name,) = (name for name in files if name.endswith(".safetensors"))
    weights = files[name]
    (length,) = struct.unpack("<Q", weights[:8])
    number = (len(weights) - 8 - length) // 4
    return packed(files | {name: weights[: 8 + length] + struct.pack("<f", value) * number})


def members(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def packed(files: Mapping[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


async def main(port: int, archive: Path, sockets: int) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=0)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits, trust_env=False) as client:
        field = Field(client, port, archive.read_bytes(), sockets, [])
        is_over = asyncio.Event()
        holding = asyncio.create_task(hold_half_open(field, is_over))
        for name, attack in ATTACKS.items():
            before, began = len(field.failures), time.perf_counter()
            await attack(field)
            seconds, number = time.perf_counter() - began, len(field.failures) - before
            print(f"  {name}: {seconds:.1f} s, {number} otherwise than expected", file=sys.stderr, flush=True)
            for line in field.failures[before : before + SHOWN]:
                print(f"    {line}", file=sys.stderr, flush=True)
        is_over.set()
        num_closed = await holding
        if sockets and not num_closed:
            field.failures.append("no half-open connection was closed")
    print(json.dumps({"attacks": len(ATTACKS), "failures": field.failures, "num_closed": num_closed}))


asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
