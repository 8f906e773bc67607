"""A run that trains and serves stands broken requests: none is answered by a 5xx or not at all, and nothing grows.

An answer of 504 is right where the request names a deadline. A route with a planted fault is the control.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import httpx
import pytest
from bench.measurement import request_of_tests
from bench.processes import python_with, running

from tests.robustness.broken_requests import Operation, Sent, operations_of, requests_over
from tests.robustness.raw_client import RawClient
from tests.robustness.servers import TIMEOUT, answers, random_archives, settled_megabytes

Record = Callable[[str, object], None]
SCHEMATHESIS = "schemathesis==4.32.5"
PROGRAMS = Path(__file__).parent / "programs"
AT_A_TIME = 8
LIMITS = (
    *("engine.max_context=256", "engine.kv_cache_bytes=64000000", "server.default_max_tokens=16"),
    *("server.max_body_bytes=300000", "server.max_adapter_bytes=300000", "server.adapters_root=."),
)
"""Limits with which a request that passes is short, and which memory reaches early."""
RUN = (
    *("name=fuzz", *LIMITS, "rollout=live", "rollout.problems_per_step=2", "rollout.group_size=2"),
    *("rollout.live.wait_seconds=1", "trainer.steps=1000000", "trainer.evaluate_problems=0"),
)
"""A run in which every route has something to do."""
COUNTED = re.compile(r'^http_requests_total\{handler="(.*?)",method="\w+",status="(\dxx)"\} (\S+)$', re.MULTILINE)


@dataclass(slots=True)
class Fuzzed:
    """The ends of the requests of one fuzzer."""

    requests: int = 0
    errors: list[str] = field(default_factory=list)
    """Answers of 500 and above, and requests without an answer."""
    statuses: Counter[str] = field(default_factory=Counter)


@pytest.mark.robustness
def test_requests_broken_in_every_part_over_every_route_cost_nothing(tmp_path: Path, record_property: Record) -> None:
    number = request_of_tests().size(100_000, 4000)
    archives = random_archives(tmp_path, 2)
    with running("parallm.train", RUN, tmp_path) as server:
        requests = requests_over(operations_for(server.url), archives, number, seed=0)
        first = asyncio.run(fuzz_routes(server.url, islice(requests, number // 2)))
        megabytes, files = settled_megabytes(server), server.open_files() or 0
        second = asyncio.run(fuzz_routes(server.url, requests))
        growth, files_growth = settled_megabytes(server) - megabytes, (server.open_files() or 0) - files
        is_alive = answers(server)
    errors = first.errors + second.errors
    record_property("fuzz.requests", first.requests + second.requests)
    record_property("fuzz.server_errors", len(errors))
    record_property("fuzz.engine_alive", int(is_alive))
    record_property("fuzz.memory_growth_mb", growth)
    record_property("fuzz.files_growth", files_growth)
    assert errors == []
    assert is_alive


@pytest.mark.robustness
def test_schemathesis_finds_no_server_error(tmp_path: Path, record_property: Record) -> None:
    examples = request_of_tests().size(8, 1)
    with running("parallm.serve", ["name=fuzz", *LIMITS], tmp_path) as server:
        found = asyncio.run(fuzz_with_schemathesis(server.url, tmp_path, examples))
        is_alive = answers(server)
    record_property("fuzz.requests", found.requests)
    record_property("fuzz.server_errors", len(found.errors))
    record_property("fuzz.engine_alive", int(is_alive))
    assert found.errors == []
    assert is_alive


@pytest.mark.robustness
def test_a_planted_fault_is_found(tmp_path: Path, record_property: Record) -> None:
    with running(str(PROGRAMS / "planted_fault.py"), RUN, tmp_path) as server:
        operations = [one for one in operations_for(server.url) if one.path == "/tokenize"]
        found = asyncio.run(fuzz_routes(server.url, requests_over(operations, [], 1300, seed=0)))
    record_property("fuzz.control_errors", len(found.errors))
    assert found.errors


ANSWERED = b"HTTP/1.1 %d X\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"


def test_answers_of_500_are_found_and_deadlines_that_were_asked_for_are_not() -> None:
    """With a made-up server of which one route fails."""
    body = {"content": {"application/json": {"example": {"model": "base", "prompt": "2 + 2"}}}}
    parameters = [{"name": "name", "in": "path"}, {"name": "mode", "in": "query"}]
    paths = {"/good": {"post": {"requestBody": body}}, "/bad": {"post": {"requestBody": body}}, "/pause": {"post": {}}}
    operations = operations_of({"paths": paths | {"/named/{name}": {"get": {"parameters": parameters}}}})
    requests = list(requests_over(operations, [], 400, 1))
    assert requests == list(requests_over(operations, [], 400, 1)) != list(requests_over(operations, [], 400, 2))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                lengths = [line[16:] for line in head.split(b"\r\n") if line.startswith(b"content-length: ")]
                await reader.readexactly(int(lengths[0]) if lengths else 0)
                path = head.split(b" ")[1]
                status = 500 if path.startswith(b"/bad") else 504 if path.startswith(b"/pause") else 200
                whole = CHUNKED if path.startswith(b"/named") else ANSWERED % status
                writer.write(whole[: whole.index(b"\r\n\r\n") + 4] if head.startswith(b"head ") else whole)
        writer.close()

    async def fuzz() -> Fuzzed:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            found = await fuzz_routes(f"http://127.0.0.1:{port}", requests)
            await asyncio.sleep(0.1)  # the ends of connections are noticed
            return found

    found = asyncio.run(fuzz())
    bad = [one for one in requests if b" /bad" in one.content.split(b"\r\n")[0] and one.is_http]
    rows = Counter(one.row for one in requests if one.is_http)
    assert (found.requests, len(found.errors)) == (400, len(bad))
    assert set(rows) == {"POST /good", "POST /bad", "POST /pause", "GET /named/{name}"}
    assert min(rows.values()) > 80


def operations_for(url: str) -> list[Operation]:
    return operations_of(httpx.get(f"{url}/openapi.json", trust_env=False).json())


async def fuzz_routes(url: str, requests: Iterable[Sent]) -> Fuzzed:
    """Send them all, some at a time, on connections that stay open."""
    found, turns = Fuzzed(), iter(requests)

    async def one_client() -> None:
        client = RawClient(int(url.rpartition(":")[2]))
        for sent in turns:
            found.requests += 1
            status = await status_of(client, sent)
            found.statuses[f"{sent.kind}: {'none' if status is None else f'{status // 100}xx'}"] += 1
            is_late = status == 504 and sent.has_deadline
            if (status is None and sent.is_http) or (status is not None and status >= 500 and not is_late):
                found.errors.append(f"{status} {sent.row} {sent.kind}: {sent.content[:600]!r}")
        client.close()

    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, trust_env=False) as client, kept_awake(client):
        await asyncio.gather(*(one_client() for _ in range(AT_A_TIME)))
    print(json.dumps(found.statuses, indent=1), file=sys.stderr)
    return found


async def status_of(client: RawClient, sent: Sent) -> int | None:
    """The highest status of several answers; 599 for none in time."""
    try:
        if sent.is_http:
            return await client.ask(sent.content)
        return max(await client.throw(sent.content), default=None)
    except TimeoutError:
        client.close()
        return 599


async def fuzz_with_schemathesis(url: str, folder: Path, examples: int) -> Fuzzed:
    """Its examples, its coverage of every constraint and its fuzzing. The server's own counters count."""
    command = [
        python_with(request_of_tests().peers / "schemathesis", [SCHEMATHESIS]), "-m", "schemathesis.cli", "run",
        f"{url}/openapi.json", "--checks=not_a_server_error", "--phases=examples,coverage,fuzzing",
        f"--max-examples={examples}", "--seed=0", "--workers=2", f"--request-timeout={TIMEOUT:.0f}",
        "--continue-on-failure", "--no-shrink", "--suppress-health-check=all", "--warnings=off",
    ]  # fmt: skip
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(PROGRAMS)}
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, trust_env=False) as client:
        async with kept_awake(client):
            process = await asyncio.create_subprocess_exec(
                *command, cwd=folder, env=environment, stdout=asyncio.subprocess.PIPE, stderr=subprocess.STDOUT
            )
            output, _ = await process.communicate()
        metrics = (await client.get("/metrics")).text
    words = output.decode(errors="replace")
    assert process.returncode in (0, 1), words[-4000:]
    assert "Test cases:" in words
    counts: Counter[str] = Counter()
    for handler, status, number in COUNTED.findall(metrics):
        if handler not in ("/resume", "/metrics"):
            counts[status] += round(float(number))
    errors = [words[-4000:]] * max(counts["5xx"], process.returncode)
    return Fuzzed(requests=counts.total(), errors=errors, statuses=counts)


@asynccontextmanager
async def kept_awake(client: httpx.AsyncClient) -> AsyncIterator[None]:
    """A fuzzer finds the routes that pause the server, and would wait for itself."""

    async def resume() -> None:
        while True:
            await client.post("/resume")
            await asyncio.sleep(0.05)

    task = asyncio.create_task(resume())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
