"""Do versions get the shares of requests that a split gives them? A short run trains three versions and serves them.

Requests are for one token each, many at a time. Then one version is unloaded while it answers.
"""

import asyncio
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from report import print_figures, print_table
from server_process import server_process

from parallm.client import AsyncClient, Client
from parallm.reports import VersionReport

WEIGHTS = {"policy@3": 6.0, "policy@2": 3.0, "base": 1.0}
AT_A_TIME = 32
TRAINING = (
    "name=split",
    "trainer.steps=3",
    "trainer.evaluate_problems=0",
    "trainer.keep_serving=true",
    "rollout.problems_per_step=2",
    "rollout.max_tokens=16",
    "rollout.temperature=1.5",
    "rollout.refill_below=1",
)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="of the split (default: %(default)s)")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder, server_process("parallm.train", list(TRAINING), Path(folder)) as url:
        wait_for_versions(url)
        counts, seconds = asyncio.run(ask(url, WEIGHTS, arguments.requests))
        told = asyncio.run(answered_by_version(url))
        failed, left = asyncio.run(ask_and_unload(url, arguments.requests // 4))
    errors = {model: counts[model] / arguments.requests - share(model) for model in WEIGHTS}
    rows = [("version", "weight", "share", "answered", "told by the server")]
    for model in WEIGHTS:
        numbers = (f"{share(model):.3f}", f"{counts[model] / arguments.requests:.4f}", str(counts[model]))
        rows.append((model, *numbers, str(told[model].num_requests)))
    print_table(f"{arguments.requests} requests in {seconds:.1f} s", rows)
    print(f"  policy@2 unloaded while it answered: {failed} requests failed, answers afterwards by {', '.join(left)}")
    print_figures({"ab.share_error": max(map(abs, errors.values())), "ab.failed_requests": float(failed)})


def share(model: str) -> float:
    return WEIGHTS[model] / sum(WEIGHTS.values())


def wait_for_versions(url: str) -> None:
    with Client(url, http=httpx.Client(base_url=url, timeout=60, trust_env=False)) as parallm:
        while parallm.training_status().state != "finished":
            time.sleep(0.2)


async def ask(url: str, weights: Mapping[str, float], number: int) -> tuple[Counter[str], float]:
    """Split `policy` and count who answers; also the seconds that it took. Raises httpx.HTTPError, ApiError."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        await AsyncClient("", http=client).set_split("policy", weights)
        began = time.perf_counter()
        answers = await answered(client, number)
        return Counter(map(str, answers)), time.perf_counter() - began


async def answered_by_version(url: str) -> Mapping[str, VersionReport]:
    """As the server counts it."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        return (await AsyncClient("", http=client).splits())["policy"].versions


async def ask_and_unload(url: str, number: int) -> tuple[int, list[str]]:
    """Unload a side of the split while requests run: how many failed, and who answers afterwards."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        asking = asyncio.create_task(answered(client, number, max_tokens=100))
        await asyncio.sleep(1)
        await AsyncClient("", http=client).unload_adapter("policy@2")
        failed = sum(model is None for model in await asking)
        return failed, sorted({str(model) for model in await answered(client, 100)})


async def answered(client: httpx.AsyncClient, number: int, max_tokens: int = 1) -> list[str | None]:
    """The model of each answer; None where there was an error."""
    turns = asyncio.Semaphore(AT_A_TIME)

    async def one(place: int) -> str | None:
        body = {"model": "policy", "prompt": "2 + 2", "max_tokens": max_tokens, "seed": place}
        async with turns:
            response = await client.post("/v1/completions", json=body)
        return response.json()["model"] if response.status_code == 200 else None

    return list(await asyncio.gather(*(one(place) for place in range(number))))


if __name__ == "__main__":
    main()
