"""Broken requests to a server that runs: those of schemathesis over its whole document, and our own."""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from job import SCRIPTS
from malformed_bodies import Malformed, malformed_bodies, routes_of
from peers import plain_python
from raw_client import RawClient
from route_requests import Operation, Sent, operations_of
from server_process import Server

SCHEMATHESIS = "schemathesis==4.32.5"
AT_A_TIME = 8
TIMEOUT = 60.0
SECONDS_BETWEEN_RESUMES = 0.05
LAST_WORDS = 4000
COUNTED = re.compile(r'^http_requests_total\{handler="(.*?)",method="\w+",status="(\dxx)"\} (\S+)$', re.MULTILINE)


@dataclass(slots=True)
class Fuzzed:
    """What became of the requests of one fuzzer."""

    requests: int = 0
    server_errors: int = 0
    """Answers of 500 and above, and no answers at all."""
    shown: list[str] = field(default_factory=list)
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)


def bodies_for(server: Server, number: int, seed: int) -> list[Malformed]:
    document = httpx.get(f"{server.url}/openapi.json", trust_env=False).json()
    return list(malformed_bodies(routes_of(document), number, seed))


def operations_for(server: Server) -> list[Operation]:
    return operations_of(httpx.get(f"{server.url}/openapi.json", trust_env=False).json())


def settled_megabytes(server: Server) -> float:
    """Resident memory without what is kept for later prompts."""
    httpx.post(f"{server.url}/reset_prefix_cache", timeout=TIMEOUT, trust_env=False).raise_for_status()
    return server.resident_megabytes()


async def fuzz_with_bodies(server: Server, bodies: Sequence[Malformed]) -> Fuzzed:
    """Send malformed bodies, some at a time."""
    found = Fuzzed()
    began = time.perf_counter()
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, trust_env=False) as client, kept_awake(client):
        await send_all(server.url, client, bodies, found)
    found.seconds = time.perf_counter() - began
    return found


async def fuzz_routes(server: Server, requests: Iterable[Sent]) -> Fuzzed:
    """Send them all, some at a time, on connections that stay open."""
    found, port, turns = Fuzzed(), int(server.url.rpartition(":")[2]), iter(requests)
    began = time.perf_counter()

    async def one_client() -> None:
        client = RawClient(port)
        for sent in turns:
            found.requests += 1
            status = await status_of(client, sent)
            found.statuses[f"{sent.kind}: {'none' if status is None else f'{status // 100}xx'}"] += 1
            is_late = status == 504 and sent.has_deadline
            if (status is None and sent.is_http) or (status is not None and status >= 500 and not is_late):
                found.server_errors += 1
                found.shown.append(f"{status} {sent.row} {sent.kind}: {sent.content[:600]!r}")
        client.close()

    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, trust_env=False) as client, kept_awake(client):
        await asyncio.gather(*(one_client() for _ in range(AT_A_TIME)))
    found.seconds = time.perf_counter() - began
    return found


async def status_of(client: RawClient, sent: Sent) -> int | None:
    """Of several answers the highest status; 599 for none in time."""
    try:
        if sent.is_http:
            return await client.ask(sent.content)
        return max(await client.throw(sent.content), default=None)
    except TimeoutError:
        client.close()
        return 599


async def send_all(url: str, client: httpx.AsyncClient, bodies: Sequence[Malformed], found: Fuzzed) -> None:
    turns = asyncio.Semaphore(AT_A_TIME)

    async def one(body: Malformed) -> None:
        path = re.sub(r"\{\w+\}", "poet", body.route.path)
        async with turns:
            try:
                response = await client.request(
                    body.route.method, f"{url}{path}", content=body.content,
                    headers={"content-type": body.content_type},
                )  # fmt: skip
                status = response.status_code
            except httpx.HTTPError as error:
                status = 599
                found.shown.append(f"{type(error).__name__}: {error}")
        found.requests += 1
        found.statuses[f"{body.kind}: {status // 100}xx"] += 1
        if status >= 500:
            found.server_errors += 1
            found.shown.append(f"{status} {body.route.method} {path} {body.kind}: {body.content[:200]!r}")

    await asyncio.gather(*(one(body) for body in bodies))


async def fuzz_with_schemathesis(server: Server, peers: Path, folder: Path, examples: int, seed: int) -> Fuzzed:
    """Its examples, its coverage of every constraint and its fuzzing, valid and not. The server's own counters count.

    Raises RuntimeError if it ends otherwise than with results.
    """
    command = [
        plain_python(peers, "schemathesis", [SCHEMATHESIS]), "-m", "schemathesis.cli", "run",
        f"{server.url}/openapi.json", "--checks=not_a_server_error", "--phases=examples,coverage,fuzzing",
        f"--max-examples={examples}", f"--seed={seed}", "--workers=2", f"--request-timeout={TIMEOUT:.0f}",
        "--continue-on-failure", "--no-shrink", "--suppress-health-check=all", "--warnings=off",
    ]  # fmt: skip
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(SCRIPTS / "workers")}
    began = time.perf_counter()
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, trust_env=False) as client:
        before = await counted(client)
        async with kept_awake(client):
            process = await asyncio.create_subprocess_exec(
                *command, cwd=folder, env=environment, stdout=asyncio.subprocess.PIPE, stderr=subprocess.STDOUT
            )
            output, _ = await process.communicate()
        seen = await counted(client)
    seen.subtract(before)
    words = output.decode(errors="replace")
    if process.returncode not in (0, 1) or "Test cases:" not in words:
        raise RuntimeError(f"schemathesis ended with {process.returncode}:\n{words[-LAST_WORDS:]}")
    return Fuzzed(
        requests=seen.total(),
        server_errors=seen["5xx"],
        shown=[] if process.returncode == 0 else [words[-LAST_WORDS:]],
        seconds=time.perf_counter() - began,
        statuses=seen,
    )


async def counted(client: httpx.AsyncClient) -> Counter[str]:
    """Requests by class of status that the server has answered, without those that only keep it awake."""
    text = (await client.get("/metrics")).text
    counts: Counter[str] = Counter()
    for handler, status, number in COUNTED.findall(text):
        if handler not in ("/resume", "/metrics"):
            counts[status] += round(float(number))
    return counts


@asynccontextmanager
async def kept_awake(client: httpx.AsyncClient) -> AsyncIterator[None]:
    """A fuzzer finds the routes that pause the server, and would wait for itself."""

    async def resume() -> None:
        while True:
            await client.post("/resume")
            await asyncio.sleep(SECONDS_BETWEEN_RESUMES)

    task = asyncio.create_task(resume())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def rows_of(found: Fuzzed) -> list[tuple[str, ...]]:
    """A table by what was broken."""
    statuses = sorted({key.rpartition(" ")[2] for key in found.statuses})
    kinds = dict.fromkeys(key.rpartition(": ")[0] for key in found.statuses)
    rows: list[tuple[str, ...]] = [("broken", *statuses)]
    rows += [(kind, *(str(found.statuses[f"{kind}: {status}"]) for status in statuses)) for kind in kinds]
    return rows


def show_errors(found: Fuzzed) -> None:
    for line in found.shown[:10]:
        print(f"  {line}", file=sys.stderr)


def joined(parts: Sequence[Fuzzed]) -> Fuzzed:
    """All of one fuzzer."""
    return Fuzzed(
        requests=sum(part.requests for part in parts),
        server_errors=sum(part.server_errors for part in parts),
        shown=[line for part in parts for line in part.shown],
        seconds=sum(part.seconds for part in parts),
        statuses=sum((part.statuses for part in parts), Counter()),
    )
