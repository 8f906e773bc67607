"""What watching costs a run: processor time of the event loop's thread, which the load of a machine does not change."""

import asyncio
import random
import time
from typing import Any

import pytest
from fastapi import FastAPI

from parallm.metrics.watching import Watching
from tests.watching.conftest import opened, served

STEP_SECONDS = 0.3
"""Shortest step of the quickstart: the embedded model on two cores."""
MAX_SHARE = 0.01
NUM_STEPS = 200


def rows() -> list[dict[str, Any]]:
    chance = random.Random(0)
    names = [f"part{number % 6}/metric_{number}" for number in range(45)]
    return [
        {"step": step, "time": step / 8, **{name: chance.random() for name in names}}
        for step in range(1, NUM_STEPS + 1)
    ]


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("wasted", [0.0, 2 * MAX_SHARE * STEP_SECONDS])
def test_three_pages_cost_less_than_a_hundredth_of_a_step(app: FastAPI, watching: Watching, wasted: float) -> None:
    """Reporting a step, its statuses and a pulse, with the events of three pages over sockets; the pages' own reading
    counts, too. The control wastes twice what is allowed."""

    async def seconds_per_step() -> float:
        async with served(app) as client, opened(client) as one, opened(client) as two, opened(client) as three:
            pages = (one, two, three)
            for page in pages:
                await page.next("hello")
            began = time.thread_time()
            for row in rows():
                watching.runs["policy"].step(row)
                watching.pulse.beat(row["time"])
                busy_until = time.thread_time() + wasted
                while time.thread_time() < busy_until:
                    pass
                for page in pages:
                    await page.next("step")
            return (time.thread_time() - began) / NUM_STEPS

    cost = asyncio.run(seconds_per_step())
    assert (cost < MAX_SHARE * STEP_SECONDS) is (wasted == 0), f"{1000 * cost:.2f} ms a step"
