"""Many requests at once, half of them given up, while the learner steps and others probe."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.interop.atropos.stage import (
    Stage,
    Trainer,
    base_overrides,
    expect,
    kv_used,
    run_api,
    sampled,
    trainer,
    wait_until,
)

NUM_REQUESTS = 32
MAX_TOKENS = 96
ROUNDS = 4
HEALTH_SECONDS = 1.0
"""Longest answer of /health."""


@pytest.mark.interop
def test_requests_that_are_given_up_leave_the_others_right(
    stage: Stage, record_property: Callable[[str, object], None]
) -> None:
    """32 requests of different prompts, of which every second is given up, in four rounds with an update in each."""
    with run_api(stage) as api, trainer(stage, base_overrides(api.url)) as one:
        alone = [asyncio.run(answer(one.url, number)) for number in range(NUM_REQUESTS)]
        expect(len({tuple(tokens) for tokens in alone}) > NUM_REQUESTS / 2, "the control: answers do not differ")
        slowest = 0.0
        for step in range(ROUNDS):
            groups = [sampled(one, 4, seed=2 * step + number) for number in range(2)]
            api.put(*groups)
            together, seconds = asyncio.run(crowd(one.url))
            slowest = max(slowest, seconds)
            wrong = [number for number, tokens in together.items() if tokens != alone[number]]
            expect(not wrong, f"answers {wrong} are not those given alone")
            one.wait_for_step(step + 1)
        held = wait_until(lambda: nothing_held(one), "aborted requests freed", 20)
        row = one.rows()[-1]
        expect(row["atropos/sequences"] == 8 * ROUNDS and row["atropos/refused"] == 0, row)
        expect(slowest < HEALTH_SECONDS, f"/health took {slowest:.2f} s")
        expect(held and kv_used(one) == 0, "memory of aborted requests is held")
    record_property("atropos.ledger_join_fraction", row["atropos/joined_fraction"])


def nothing_held(one: Trainer) -> bool:
    queue: dict[str, Any] = one.http.get("/v1/queue").json()
    return not any(queue[name] for name in ("num_running", "num_waiting", "num_in_flight", "num_held"))


async def crowd(url: str) -> tuple[dict[int, Sequence[int]], float]:
    """The answers of the requests that were not given up, and the longest that /health took meanwhile."""
    tasks = {number: asyncio.create_task(answer(url, number)) for number in range(NUM_REQUESTS)}
    seconds: list[float] = []
    probing = asyncio.create_task(probe(url, seconds))
    await asyncio.sleep(0.3)
    for number in range(0, NUM_REQUESTS, 2):
        tasks[number].cancel()
    kept = {number: await tasks[number] for number in range(1, NUM_REQUESTS, 2)}
    probing.cancel()
    with suppress(asyncio.CancelledError):
        await probing
    return kept, max(seconds)


async def probe(url: str, seconds: list[float]) -> None:
    """Ask as atroposlib does while it runs: is the server well, and a word of one token."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        while True:
            began = time.monotonic()
            (await http.get("/health")).raise_for_status()
            seconds.append(time.monotonic() - began)
            (await http.post("/v1/chat/completions", json=body)).raise_for_status()
            await asyncio.sleep(0.05)


async def answer(url: str, number: int) -> Sequence[int]:
    """The tokens of a greedy answer of the base, which no update changes, to a question of its own."""
    prompt = f"{number} + {number + 2} ="
    body = {"model": "base", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
        response = await http.post("/v1/completions", json=body | {"ignore_eos": True})
        response.raise_for_status()
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens
