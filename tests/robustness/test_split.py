"""Versions get the shares of requests that a split gives them. A short run trains three versions and serves them.

Requests are for one token each, many at a time. Then one version is unloaded while it answers.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from bench.measurement import request_of_tests
from bench.processes import running

from parallm.client import AsyncClient, Client

WEIGHTS = {"policy@3": 6.0, "policy@2": 3.0, "base": 1.0}
AT_A_TIME = 32
TRAINING = (
    *("name=split", "trainer.steps=3", "trainer.evaluate_problems=0", "trainer.keep_serving=true"),
    *("rollout.problems_per_step=2", "rollout.max_tokens=16", "rollout.temperature=1.5", "rollout.refill_below=1"),
)


@pytest.mark.robustness
def test_versions_get_their_shares_and_unloading_one_costs_no_request(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    number = request_of_tests().size(2000, 200)
    with running("parallm.train", TRAINING, tmp_path) as server:
        with Client(server.url, http=httpx.Client(base_url=server.url, timeout=60, trust_env=False)) as parallm:
            while parallm.training_status().state != "finished":
                time.sleep(0.2)
        errors, failed, left = asyncio.run(split_and_unload(server.url, number))
    record_property("ab.share_error", max(map(abs, errors.values())))
    record_property("ab.failed_requests", failed)
    assert failed == 0
    assert "policy@2" not in left


async def split_and_unload(url: str, number: int) -> tuple[dict[str, float], int, set[str | None]]:
    """By how much each version's share is off, the requests that failed as one was unloaded, and who answers then."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        parallm = AsyncClient("", http=client)
        await parallm.set_split("policy", WEIGHTS)
        counts = Counter(await answers(client, number))
        told = (await parallm.splits())["policy"].versions
        assert {model: told[model].num_requests for model in WEIGHTS} == {model: counts[model] for model in WEIGHTS}
        asking = asyncio.create_task(answers(client, number // 4, max_tokens=100))
        await asyncio.sleep(1)
        await parallm.unload_adapter("policy@2")
        failed = (await asking).count(None)
        left = set(await answers(client, 100))
    shares = {model: weight / sum(WEIGHTS.values()) for model, weight in WEIGHTS.items()}
    return {model: counts[model] / number - share for model, share in shares.items()}, failed, left


async def answers(client: httpx.AsyncClient, number: int, max_tokens: int = 1) -> list[str | None]:
    """The model of each answer; None for an error."""
    turns = asyncio.Semaphore(AT_A_TIME)

    async def one(place: int) -> str | None:
        body = {"model": "policy", "prompt": "2 + 2", "max_tokens": max_tokens, "seed": place}
        async with turns:
            response = await client.post("/v1/completions", json=body)
        return response.json()["model"] if response.status_code == 200 else None

    return list(await asyncio.gather(*map(one, range(number))))
