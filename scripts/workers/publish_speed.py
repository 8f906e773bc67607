"""Publishes `repeats` versions while 8 requests decode, and times each publish. Prints milliseconds."""

import asyncio
import json
import sys
import time
from dataclasses import replace

from job import Job, read_job
from workbench import Workbench, open_workbench, random_adapter

from parallm.errors import ParallmError
from parallm.types import POLICY, GenerationRequest, SamplingParams

CLIENTS = 8
SECONDS_BETWEEN = 0.02
NUM_ADAPTERS = 4
"""Different arrays in turn, so that a new version is never what the engine has prepared already."""


async def measure(job: Job) -> dict[str, object]:
    bench = await open_workbench(job)
    adapters = [bench.adapter]
    for seed in range(1, NUM_ADAPTERS):
        adapters.append(await bench.on_device(lambda seed=seed: random_adapter(bench.model, 1, seed)))  # type: ignore[misc]
    over = asyncio.Event()
    clients = [asyncio.create_task(request_until(bench, over, place)) for place in range(CLIENTS)]
    await asyncio.sleep(1.0)
    publish: list[float] = []
    for place in range(job.repeats):
        adapter = replace(adapters[place % NUM_ADAPTERS], version=2 + place, parent=1 + place)
        began = time.perf_counter()
        bench.table.publish(adapter)  # from the asyncio thread, as the trainer does
        publish.append(1e3 * (time.perf_counter() - began))
        await asyncio.sleep(SECONDS_BETWEEN)
    over.set()
    results = await asyncio.gather(*clients)
    bench.close()
    finished, failed, tokens = (sum(column) for column in zip(*results, strict=True))
    return {"publish": publish, "finished": finished, "failed": failed, "tokens": tokens}


async def request_until(bench: Workbench, over: asyncio.Event, place: int) -> tuple[int, int, int]:
    """One request after the other; requests finished, requests failed, tokens."""
    finished = failed = tokens = 0
    prompts = bench.requests("publish", CLIENTS, SamplingParams(max_tokens=bench.job.max_tokens, ignore_eos=True))
    while not over.is_set():
        request: GenerationRequest = replace(
            prompts[place], request_id=f"publish-{place}-{finished + failed}", n=1, model=POLICY, traffic="serving"
        )
        try:
            tokens += len((await bench.engine.generate(request))[0].tokens)
            finished += 1
        except ParallmError:
            failed += 1
    return finished, failed, tokens


print(json.dumps(asyncio.run(measure(read_job(sys.argv[1])))))
