"""What one address before several workers costs, keeps and survives."""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import cycle
from pathlib import Path
from statistics import median
from unittest.mock import patch

import httpx

from bench.compare import p99, print_table, ratio
from bench.measurement import Bar, Figures, Request, has_gpu, measurement
from bench.problems import questions
from bench.processes import Server, clean_environment, free_port, work
from parallm.distributed.front import relay
from parallm.distributed.front.affinity import Affinity, Prompt
from parallm.distributed.front.process import FrontProcess, open_front, standing_front
from parallm.distributed.front.workers import Worker
from parallm.distributed.gang import Interrupts
from parallm.distributed.settings import FrontSettings
from parallm.server.operation.sockets import bind
from parallm.server.settings import ServerSettings

READER = Path(__file__).parents[1] / "workers" / "stream_reader.py"
WORKERS, STREAMS = 2, 64
SECONDS_TO_START, SECONDS_PER_TOKEN = 120.0, 0.002
ASK = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"


@measurement({"front.added_ms": Bar(max=0.3), "front.added_p99_ms": Bar()}, minutes=0.5)
def front_cost(request: Request) -> Figures:
    """What a request takes longer through the front than at the worker itself, which has nothing to compute.

    One client asks both in turns, on a connection that stays open. The p99 is that of the difference of neighbours.
    """
    number = request.size(3000, 200)
    with ExitStack() as stack:
        ports = [stack.enter_context(fake_process()) for _ in range(WORKERS)]
        url = stack.enter_context(front_process([f"http://127.0.0.1:{port}" for port in ports]))
        text = json.dumps(
            {"messages": [{"role": "user", "content": "What is 2 + 3? " * 20}], "max_tokens": 16}
        ).encode()
        connections = [stack.enter_context(connected(port)) for port in (ports[0], int(url.rpartition(":")[2]))]
        times = [[seconds_of(one, ASK % len(text) + text) for one in connections] for _ in range(number)][
            number // 10 :
        ]
    differences = [1e3 * (through - direct) for direct, through in times]
    added = median(1e3 * through for _, through in times) - median(1e3 * direct for direct, _ in times)
    print_table("A request, ms", [("direct", median(1e3 * one for one, _ in times)), ("added by the front", added)])
    return {"front.added_ms": added, "front.added_p99_ms": p99(differences)}


@measurement(
    {
        "front.throughput_ratio": Bar(min=0.95, needs="gpu"),
        "front.control_throughput_ratio": Bar(max=0.7, needs="gpu"),
        "front.prefix_ratio": Bar(min=0.95),
        "front.control_prefix_ratio": Bar(max=0.8),
        "front.prefix_load_ratio": Bar(max=1.5),
    },
    minutes=5,
)
def front_workers(request: Request) -> Figures:
    """Two servers, with a GPU each of a 0.5B shape, alone and through the front, in turns.

    Tokens/s of 64 streams through the front over those of 32 at each worker; the control is a front that knows one of
    them. On two cores a second worker, the clients and the front all take from each other: no bar holds there.

    Prompt tokens from caches in conversations of 6 turns, 16 at a time, over those of the same at one worker alone. The
    load is that of requests handed to each, the most over the least; the control takes the workers in turns.
    """
    with tempfile.TemporaryDirectory() as name, serving(request, Path(name)) as servers:
        urls = [server.url for server in servers]
        speeds = throughput_figures(request, urls)
        texts = questions(request.data, request.size(48, 8))
        return speeds | asyncio.run(prefix_figures(urls, texts, request.size(6, 3)))


def throughput_figures(request: Request, urls: Sequence[str]) -> Figures:
    rounds, max_tokens = request.size(3, 1), request.size(160, 16)
    groups = [questions(request.data, request.size(STREAMS, 8))[number::WORKERS] for number in range(WORKERS)]
    with front_process(urls) as front, front_process(urls[:1]) as control:
        sides = {"workers": urls, "front": [front] * WORKERS, "control": [control] * WORKERS}
        speeds: dict[str, list[float]] = {name: [] for name in sides}
        for side in sides.values():
            tokens_per_second(side, groups, max_tokens)  # compiles, and fills caches of prompts alike
        for _ in range(rounds):
            for name, side in sides.items():
                speeds[name].append(tokens_per_second(side, groups, max_tokens))
    print_table("Tokens/s of 64 streams", [("", "median"), *((name, median(own)) for name, own in speeds.items())])
    return {
        "front.throughput_ratio": ratio(speeds["front"], speeds["workers"]),
        "front.control_throughput_ratio": ratio(speeds["control"], speeds["workers"]),
    }


async def prefix_figures(urls: Sequence[str], texts: Sequence[str], turns: int) -> Figures:
    in_turns = cycle(range(len(urls)))

    def choose_in_turns(_: Affinity, prompt: Prompt, workers: Sequence[Worker]) -> Worker:
        return workers[next(in_turns) % len(workers)]

    alone = await cached_share(urls[0], texts, turns, salt="alone")
    async with front_here(urls) as (front, workers):
        through = await cached_share(front, texts, turns, salt="front")
        counts = [worker.num_requests for worker in workers]
    async with front_here(urls) as (front, _):
        with patch.object(Affinity, "choose", choose_in_turns):
            control = await cached_share(front, texts, turns, salt="control")
    rows = [("one worker", alone), ("front", through), ("in turns", control)]
    print_table("Share of prompt tokens from caches", [("", "share"), *rows])
    return {
        "front.prefix_ratio": through / alone,
        "front.control_prefix_ratio": control / alone,
        "front.prefix_load_ratio": max(counts) / max(1, min(counts)),
    }


@measurement(
    {
        "front.kills": Bar(min=100),
        "front.kill_requests": Bar(min=1000),
        "front.kill_failures": Bar(max=0),
        "front.kill_streams_cut": Bar(),
        "front.control_kill_failures": Bar(min=1),
    },
    minutes=2,
)
def front_kills(request: Request) -> Figures:
    """Requests that fail before their first byte while one of three workers after the other is killed by SIGKILL.

    The next is killed once the one before answers again. A stream that had begun must end with an error event. The
    control is a front that sends no request twice.
    """
    kills = request.size(100, 5)
    counts = asyncio.run(kill_workers(kills))
    with patch.object(relay, "MAX_LOST", 1):
        control = asyncio.run(kill_workers(max(kills // 4, 5)))
    print_table("Requests while workers are killed", [("", *counts), ("front", *counts.values())])
    return {
        "front.kills": counts["kills"],
        "front.kill_requests": counts["requests"],
        "front.kill_failures": counts["failures"],
        "front.kill_streams_cut": counts["cut"],
        "front.control_kill_failures": control["failures"],
    }


async def kill_workers(kills: int, *, workers: int = 3, clients: int = 12) -> dict[str, int]:
    counts = dict.fromkeys(("kills", "requests", "failures", "cut"), 0)
    source, over = random.Random(0), asyncio.Event()
    ports = [free_port() for _ in range(workers)]
    processes = [start_fake(port, SECONDS_PER_TOKEN) for port in ports]
    try:
        async with (
            front_here([f"http://127.0.0.1:{port}" for port in ports]) as (url, all_workers),
            httpx.AsyncClient(base_url=url, timeout=90, trust_env=False) as client,
        ):

            async def ask(number: int) -> None:
                while not over.is_set():
                    counts["requests"] += 1
                    outcome = await outcome_of(client, f"{number} {counts['requests']}", source.random() < 0.5)
                    counts[outcome] = counts.get(outcome, 0) + 1

            asking = [asyncio.create_task(ask(number)) for number in range(clients)]
            while counts["kills"] < kills:
                await asyncio.sleep(source.uniform(0.05, 0.4))
                while not all(worker.is_up for worker in all_workers):
                    await asyncio.sleep(0.02)
                number = source.randrange(workers)
                processes[number].kill()
                processes[number].wait()
                processes[number] = start_fake(ports[number], SECONDS_PER_TOKEN)
                counts["kills"] += 1
            over.set()
            await asyncio.gather(*asking)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return counts


async def outcome_of(client: httpx.AsyncClient, text: str, stream: bool) -> str:
    """How one request ends: `good`, `cut` (a stream with an error as its last event), or `failures`."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 16, "stream": stream}
    try:
        response = await client.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        print(f"  {type(error).__name__}: {error}")
        return "failures"
    if response.status_code != 200:
        print(f"  {response.status_code}: {response.text[:200]}")
        return "failures"
    if not stream:
        return "good"
    *_, last, end = response.text.split("\n\n")
    if end or not (last == "data: [DONE]" or "worker_lost" in last):
        return "failures"
    return "good" if last == "data: [DONE]" else "cut"


async def cached_share(url: str, texts: Sequence[str], turns: int, *, salt: str) -> float:
    """Share of prompt tokens from caches, of conversations that all begin with the same words."""
    cached = total = 0
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:

        async def converse(first: str) -> None:
            nonlocal cached, total
            messages = [{"role": "user", "content": f"{salt}: {first}"}]
            for turn in range(turns):
                body = {"model": "base", "messages": messages, "max_tokens": 24, "temperature": 0, "cache_salt": salt}
                response = await client.post("/v1/chat/completions", json=body)
                response.raise_for_status()
                answer = response.json()
                total += answer["usage"]["prompt_tokens"]
                cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
                messages.append({"role": "user", "content": f"And question {turn + 2}: {texts[turn]}"})

        at_once = asyncio.Semaphore(16)

        async def bounded(first: str) -> None:
            async with at_once:
                await converse(first)

        await asyncio.gather(*map(bounded, texts))
    return cached / total


def tokens_per_second(urls: Sequence[str], groups: Sequence[Sequence[str]], max_tokens: int) -> float:
    """All groups at the same time, each at its address; the slowest counts."""
    readers = []
    for url, group in zip(urls, groups, strict=True):
        bodies = [
            {"model": "base", "prompt": text, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
            for text in group
        ]
        command = [sys.executable, str(READER), url.rpartition(":")[2]]
        reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        readers.append((reader, json.dumps(bodies)))
    seconds = []
    for reader, text in readers:  # all have begun to read their bodies before the first is waited for
        assert reader.stdin is not None
        reader.stdin.write(text)
        reader.stdin.close()
        reader.stdin = None
    for reader, _ in readers:
        seconds.append(json.loads(reader.communicate()[0])["seconds"])
    return sum(map(len, groups)) * max_tokens / max(seconds)


@contextmanager
def serving(request: Request, folder: Path) -> Iterator[Sequence[Server]]:
    """Two servers of the same model, each with a GPU of its own where there are two; on a GPU of a 0.5B shape."""
    model = request.model
    if has_gpu():
        model = str(folder / "model")
        Path(model).mkdir()
        work("random_folder", shape="tiny" if request.is_quick else "0.5b", folder=model)
    keys = [f"model.path={model}", "server.state=off"]
    servers = [Server("parallm.serve", [*keys, f"name=bench_{number}"], folder) for number in range(WORKERS)]
    try:
        for number, server in enumerate(servers):
            with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": str(number)} if has_gpu() else {}):
                server.spawn()
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.stop()


@contextmanager
def front_process(urls: Sequence[str]) -> Iterator[str]:
    """A front in a process of its own, with all workers ready."""
    settings = ServerSettings(port=free_port())
    with (
        patch.dict(os.environ, clean_environment()),
        standing_front(settings, FrontSettings(), Interrupts()) as process,
    ):
        assert isinstance(process, FrontProcess), "it is enabled"
        process.set_workers(dict(enumerate(urls)))
        url = f"http://127.0.0.1:{settings.port}"
        deadline = time.monotonic() + SECONDS_TO_START
        while len(httpx.get(f"{url}/health", trust_env=False, timeout=60).json()["workers"]) < len(urls):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the front of {urls} was not ready within {SECONDS_TO_START:.0f} s")
            time.sleep(0.05)
        yield url


@asynccontextmanager
async def front_here(urls: Sequence[str]) -> AsyncIterator[tuple[str, Sequence[Worker]]]:
    """A front in this process, whose parts can be replaced."""
    settings = ServerSettings(port=0)
    bound = bind(settings)
    async with open_front(settings, FrontSettings(), (), bound) as (workers, _):
        workers.set(dict(enumerate(urls)))
        async with asyncio.timeout(SECONDS_TO_START):
            while len(workers.up) < len(urls):
                await asyncio.sleep(0.05)
        yield bound.url, workers.all


def start_fake(port: int, seconds_per_token: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench.fake_worker", str(port), str(seconds_per_token)]
    return subprocess.Popen(command, env=clean_environment())


@contextmanager
def fake_process() -> Iterator[int]:
    """A worker without a model, and its port."""
    port = free_port()
    process = start_fake(port, 0.0)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


def seconds_of(connection: socket.socket, request: bytes) -> float:
    """Time until the last byte of an answer with a length."""
    began, got = time.perf_counter(), b""
    connection.sendall(request)
    while True:
        got += connection.recv(1 << 16)
        head, end, body = got.partition(b"\r\n\r\n")
        if end and len(body) >= int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]):
            return time.perf_counter() - began
