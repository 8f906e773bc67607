"""Does a server stand broken requests, and two hundred clients at once? A real process on loopback is asked.

Fuzzing: schemathesis over the whole /openapi.json, malformed bodies of our own, and requests over every route of a run
that learns from live traffic, broken in every part. No answer may be of 500 or above, but 504 where the request names a
deadline; the engine must answer afterwards; memory and open files must not grow. A route with a planted fault is the
control: it must be found.

Load: clients that stream, wait, leave and are aborted by id, while adapters are uploaded, promoted and unloaded.
Nothing may be lost, every finished greedy answer must be what its prompt and version gave alone, and in the end nothing
may be held. A BLAS that is not strict may compute a row otherwise in company, so that near ties count as wrong.
"""

import asyncio
import random
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from job import SCRIPTS, absolute, base_job, blas_name, run_worker
from malformed_bodies import Malformed
from peers import DEFAULT_FOLDER
from report import Figures, print_figures, print_table
from route_requests import requests_over
from server_fuzz import (
    Fuzzed,
    bodies_for,
    fuzz_routes,
    fuzz_with_bodies,
    fuzz_with_schemathesis,
    joined,
    operations_for,
    rows_of,
    settled_megabytes,
    show_errors,
)
from server_load import PINNED, Adapters, Tally, load_for, share_of_distinct
from server_process import Server, running_server

FUZZED = (
    "name=fuzz",
    "engine.max_context=256",
    "engine.kv_cache_bytes=64000000",
    "server.default_max_tokens=16",
    "server.max_body_bytes=300000",
    "server.max_adapter_bytes=300000",
)
"""Limits that make a request that passes short, and that memory reaches early."""
LIVE = (
    "rollout=live",
    "rollout.problems_per_step=2",
    "rollout.group_size=2",
    "rollout.live.wait_seconds=1",
    "trainer.steps=1000000",
    "trainer.evaluate_problems=0",
)
"""A run in which every route has something behind it."""
CONTROL_REQUESTS = 1300
LOADED = ("name=load", "engine.max_context=512")
PROMPTS = 24
SECONDS_TO_DRAIN = 30.0
KV_USED = re.compile(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", re.MULTILINE)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nano", help="nano or a local folder (default: %(default)s)")
    parser.add_argument("--blas", default="auto", help="auto, mkl, openblas or reference (default: %(default)s)")
    parser.add_argument("--only", choices=("fuzz", "load"), help="default: both")
    parser.add_argument("--bodies", type=int, default=2000, help="malformed ones of our own (default: %(default)s)")
    parser.add_argument(
        "--requests", type=int, default=100_000, help="over every route, broken in every part (default: %(default)s)"
    )
    parser.add_argument(
        "--examples", type=int, default=8, help="of schemathesis for each route, twice (default: %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="of load (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=200, help="at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", help="of the loaded server, such as engine.kv_cache_bytes=50000000")
    arguments = parser.parse_args()
    arguments.data = None
    figures: dict[str, float | None] = {}
    if arguments.only != "load":
        figures |= fuzz(arguments)
    if arguments.only != "fuzz":
        figures |= load(arguments)
    print_figures(figures, device=blas_name(base_job(arguments)))


def fuzz(arguments: Namespace) -> Figures:
    """The model is always the embedded one: what is read of a body does not depend on it."""
    bodies = fuzz_bodies(arguments)
    routes = fuzz_routes_of_a_run(arguments)
    return {
        "fuzz.requests": bodies["requests"] + routes["requests"],
        "fuzz.server_errors": bodies["server_errors"] + routes["server_errors"],
        "fuzz.engine_alive": min(bodies["engine_alive"], routes["engine_alive"]),
        "fuzz.memory_growth_mb": max(bodies["memory_growth_mb"], routes["memory_growth_mb"]),
        "fuzz.files_growth": routes["files_growth"],
        "fuzz.control_errors": find_planted_fault(arguments),
    }


def fuzz_bodies(arguments: Namespace) -> dict[str, float]:
    with (
        TemporaryDirectory() as name,
        running_server("parallm.serve", overrides(arguments, *FUZZED), Path(name)) as server,
    ):
        bodies = bodies_for(server, arguments.bodies, arguments.seed)
        first = fuzz_once(arguments, server, bodies[: len(bodies) // 2], arguments.seed)
        before = settled_megabytes(server)
        second = fuzz_once(arguments, server, bodies[len(bodies) // 2 :], arguments.seed + 1)
        growth = settled_megabytes(server) - before
        is_alive = answers(server)
    ours, theirs = (joined(parts) for parts in zip(first, second, strict=True))
    print_table(f"{ours.requests} malformed bodies in {ours.seconds:.0f} s", rows_of(ours))
    counts = ", ".join(f"{number} {status}" for status, number in sorted(theirs.statuses.items()))
    print(f"  schemathesis: {theirs.requests} requests in {theirs.seconds:.0f} s: {counts}")
    return told(joined((ours, theirs)), before, growth, is_alive=is_alive)


def fuzz_routes_of_a_run(arguments: Namespace) -> dict[str, float]:
    with TemporaryDirectory() as name:
        archives = made_archives(arguments, Path(name), 2)
        with running_server("parallm.train", overrides(arguments, *FUZZED, *LIVE), Path(name)) as server:
            operations = operations_for(server)
            requests = requests_over(operations, archives, arguments.requests, arguments.seed)
            first = asyncio.run(fuzz_routes(server, islice(requests, arguments.requests // 2)))
            before, files = settled_megabytes(server), server.open_files()
            second = asyncio.run(fuzz_routes(server, requests))
            growth, files_after = settled_megabytes(server) - before, server.open_files()
            is_alive = answers(server)
    found = joined((first, second))
    title = f"{found.requests} requests over {len(operations)} routes in {found.seconds:.0f} s"
    print_table(title, rows_of(found))
    print(f"  open files after half of all: {files}, in the end: {files_after}")
    figures = told(found, before, growth, is_alive=is_alive)
    return figures | {"files_growth": 0.0 if files is None or files_after is None else float(files_after - files)}


def find_planted_fault(arguments: Namespace) -> float:
    """How often a fault in one route was found."""
    with TemporaryDirectory() as name:
        planted = str(SCRIPTS / "workers" / "planted_fault.py")
        with running_server(planted, overrides(arguments, *FUZZED, *LIVE), Path(name)) as server:
            operations = operations_for(server)
            one = [operation for operation in operations if operation.path == "/tokenize"]
            number = max(CONTROL_REQUESTS, arguments.requests // len(operations))  # what each route gets
            found = asyncio.run(fuzz_routes(server, requests_over(one, [], number, arguments.seed)))
    print(f"  control: a planted fault was found {found.server_errors} times in {found.requests} requests")
    return float(found.server_errors)


def told(found: Fuzzed, before: float, growth: float, *, is_alive: bool) -> dict[str, float]:
    print(f"  memory after half of all: {before:.0f} MB, grown by {growth:.1f} MB in the end")
    print(f"  the engine {'answers' if is_alive else 'DOES NOT ANSWER'} afterwards")
    show_errors(found)
    return {
        "requests": float(found.requests),
        "server_errors": float(found.server_errors),
        "engine_alive": float(is_alive),
        "memory_growth_mb": growth,
    }


def fuzz_once(arguments: Namespace, server: Server, bodies: Sequence[Malformed], seed: int) -> tuple[Fuzzed, Fuzzed]:
    """What became of our bodies and of schemathesis' requests. Everything is read once before memory is compared."""
    ours = asyncio.run(fuzz_with_bodies(server, bodies))
    with TemporaryDirectory() as name:
        work = fuzz_with_schemathesis(server, arguments.peers, Path(name), arguments.examples, seed)
        return ours, asyncio.run(work)


def made_archives(arguments: Namespace, folder: Path, number: int) -> list[bytes]:
    run_worker("random_adapters", replace(base_job(arguments), prompts=number, trajectories=str(folder)))
    return [(folder / f"{place}.zip").read_bytes() for place in range(number)]


def load(arguments: Namespace) -> Figures:
    model = absolute(arguments.model)
    with TemporaryDirectory() as name:
        folder = Path(name)
        archives = made_archives(arguments, folder, PINNED)
        asked = overrides(arguments, *LOADED, f"model.path={model}", *arguments.overrides)
        with running_server("parallm.serve", asked, folder) as server:
            work = load_for(
                server.url,
                prompts_of(arguments.seed),
                archives,
                clients=arguments.clients,
                seconds=arguments.minutes * 60,
                seed=arguments.seed,
            )
            tally, adapters = asyncio.run(work)
            drained, held = drain(server)
            kv_share = kv_used(server)
    show_load(arguments, tally, adapters)
    print(f"  drained in {drained:.2f} s; held in the end: {held}; share of keys and values: {kv_share:g}")
    return {
        "load.clients": float(arguments.clients),
        "load.requests": float(tally.ends.total() + len(tally.lost)),
        "load.checked": float(tally.checked),
        "load.lost": float(len(tally.lost)),
        "load.wrong": float(len(tally.wrong)),
        "load.leaked_slots": float(sum(held.values())),
        "load.leaked_kv_share": kv_share,
    }


def overrides(arguments: Namespace, *more: str) -> list[str]:
    return [f"device.blas={arguments.blas}", "server.adapters_root=.", *more]


def prompts_of(seed: int) -> list[str]:
    """Some begin alike, so that one prompt's keys and values may serve another."""
    source = random.Random(seed)
    beginning = "Mia has 12 apples and gets some more from Tom. " * 4
    plain = [f"{source.randrange(100)} + {source.randrange(100)} = " for _ in range(PROMPTS // 2)]
    return plain + [f"{beginning * source.randrange(1, 3)}{source.randrange(100)} + 1 = " for _ in plain]


def answers(server: Server) -> bool:
    httpx.post(f"{server.url}/resume", timeout=SECONDS_TO_DRAIN, trust_env=False)  # the last request may be a pause
    body = {"model": "base", "prompt": "2 + 2", "max_tokens": 4}
    try:
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=SECONDS_TO_DRAIN, trust_env=False)
    except httpx.HTTPError:
        return False
    return response.status_code == 200 and bool(response.json()["choices"])


def drain(server: Server) -> tuple[float, Mapping[str, int]]:
    """The seconds until nothing was held, at most 30, and what was held then."""
    began = time.perf_counter()
    while True:
        with httpx.Client(base_url=server.url, timeout=SECONDS_TO_DRAIN, trust_env=False) as client:
            queue = client.get("/v1/queue").json()
            cards = client.get("/v1/adapters").json()["data"]
        held = {name: queue[name] for name in ("num_running", "num_waiting", "num_in_flight", "num_held")}
        held["adapters"] = sum(card["num_running"] for card in cards)
        seconds = time.perf_counter() - began
        if not any(held.values()) or seconds > SECONDS_TO_DRAIN:
            return seconds, held
        time.sleep(0.1)


def kv_used(server: Server) -> float:
    """The share of memory for keys and values that is used when nothing is kept for later prompts."""
    with httpx.Client(base_url=server.url, timeout=SECONDS_TO_DRAIN, trust_env=False) as client:
        client.post("/reset_prefix_cache").raise_for_status()
        (share,) = KV_USED.findall(client.get("/metrics").text)
    return float(share)


def show_load(arguments: Namespace, tally: Tally, adapters: Adapters) -> None:
    rows = [("ended", "requests"), *((end, str(number)) for end, number in sorted(tally.ends.items()))]
    rows += [("lost", str(len(tally.lost))), ("wrong", f"{len(tally.wrong)} of {tally.checked} checked")]
    print_table(f"{arguments.clients} clients for {arguments.minutes:g} minutes: {arguments.model}", rows)
    alone = f"{share_of_distinct(adapters):.0%} of {len(adapters.alone)} answers given alone are different"
    swaps = f"{adapters.uploads} uploads, {adapters.promotions} promotions, {adapters.unloads} unloads"
    print(f"  {swaps} meanwhile; checked answers came from {len(tally.versions)} versions; {alone}")
    for line in (*tally.lost[:5], *tally.wrong[:5]):
        print(f"  {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
