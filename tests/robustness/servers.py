"""What tests of robustness ask of a server: its state, its memory, adapters for it."""

import time
from pathlib import Path
from typing import Any

import httpx
from bench.processes import Server, work

TIMEOUT = 60.0
SECONDS_TO_DRAIN = 30.0


def settled_megabytes(server: Server) -> float:
    """Resident memory without what is kept for later prompts."""
    httpx.post(f"{server.url}/reset_prefix_cache", timeout=TIMEOUT, trust_env=False).raise_for_status()
    return server.resident_megabytes()


def answers(server: Server) -> bool:
    """Whether the engine does. Resumes it first: a request before this one may have paused it."""
    httpx.post(f"{server.url}/resume", timeout=TIMEOUT, trust_env=False)
    body = {"model": "base", "prompt": "2 + 2", "max_tokens": 4}
    try:
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT, trust_env=False)
    except httpx.HTTPError:
        return False
    return response.status_code == 200 and bool(response.json()["choices"])


def held(server: Server) -> int:
    """Requests and uses of adapters that the server still holds after at most half a minute."""
    ends = time.perf_counter() + SECONDS_TO_DRAIN
    with httpx.Client(base_url=server.url, timeout=TIMEOUT, trust_env=False) as client:
        while True:
            queue: dict[str, Any] = client.get("/v1/queue").json()
            cards = client.get("/v1/adapters").json()["data"]
            number = sum(queue[name] for name in ("num_running", "num_waiting", "num_in_flight", "num_held"))
            number += sum(card["num_running"] for card in cards)
            if not number or time.perf_counter() > ends:
                return int(number)
            time.sleep(0.1)


def kv_share(server: Server) -> float:
    """The share of memory for keys and values that is used when nothing is kept for later prompts."""
    with httpx.Client(base_url=server.url, timeout=TIMEOUT, trust_env=False) as client:
        client.post("/reset_prefix_cache").raise_for_status()
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:kv_cache_usage_perc{"))


def random_archives(folder: Path, number: int, model: str = "nano") -> list[bytes]:
    """Adapters with random weights, as they are uploaded."""
    work("tests.robustness.random_adapters", model=model, folder=str(folder), number=number)
    return [(folder / f"{place}.zip").read_bytes() for place in range(number)]


def prompts() -> list[str]:
    """Prompts of which some begin alike, so that one prompt's keys and values may serve another."""
    beginning = "Mia has 12 apples and gets some more from Tom. "
    plain = [f"{7 * number % 100} + {number} = " for number in range(12)]
    return plain + [f"{beginning * (4 + 4 * (number % 2))}{number} + 1 = " for number in range(12)]
