"""What a publish costs the next request: `repeats` versions are published while 8 requests decode.

Each time one request for one token is sent without a publish before it, and one right after a publish, which has to be
answered by the new version. Both are sent as the others get tokens, so that they wait for the same part of a step. The
results are milliseconds: of the publish, from before it until the token is there, and from the other request until its
token.
"""

import asyncio
import time
from dataclasses import replace

from bench.workers.workbench import Workbench, open_workbench, random_adapter
from parallm.errors import ParallmError
from parallm.types import POLICY, GenerationRequest, SamplingParams

CLIENTS = 8
SECONDS_BETWEEN = 0.5
"""Between two of these requests: a version a second, so that rows of about three versions decode."""
NUM_ADAPTERS = 4
"""Different arrays in turn."""
LOAD_TOKENS = 64


async def main(
    *, model: str = "nano", data: str | None = None, shape: str | None = None, repeats: int
) -> dict[str, object]:
    async with open_workbench(model=model, shape=shape) as bench:
        return await measure(bench, data, repeats)


async def measure(
    bench: Workbench, data: str | None, repeats: int, clients: int = CLIENTS, seconds_between: float = SECONDS_BETWEEN
) -> dict[str, object]:
    adapters = [bench.adapter]
    for seed in range(1, NUM_ADAPTERS):
        adapters.append(await bench.on_device(lambda seed=seed: random_adapter(bench.model, 1, seed)))  # type: ignore[misc]
    over, ticks = asyncio.Event(), asyncio.Condition()
    prompts = bench.requests("publish", data, clients, SamplingParams(max_tokens=LOAD_TOKENS, ignore_eos=True))
    tasks = [asyncio.create_task(request_until(bench, prompt, over, ticks)) for prompt in prompts]
    await next_step(ticks)
    times: dict[str, list[float]] = {"publish": [], "to_first_token": [], "without": []}
    for place in range(repeats):
        version = 2 + place
        adapter = replace(adapters[place % NUM_ADAPTERS], version=version, parent=version - 1)
        await asyncio.sleep(seconds_between)
        await next_step(ticks)
        times["without"].append(await seconds_to_token(bench, data, f"without-{place}", version - 1))
        await asyncio.sleep(seconds_between)
        await next_step(ticks)
        began = time.perf_counter()
        bench.table.publish(adapter)  # from the asyncio thread, as the trainer does
        published = time.perf_counter() - began
        times["publish"].append(published)
        times["to_first_token"].append(published + await seconds_to_token(bench, data, f"after-{place}", version))
    over.set()
    results = await asyncio.gather(*tasks)
    finished, failed, tokens = (sum(column) for column in zip(*results, strict=True))
    milliseconds = {name: [1e3 * one for one in seconds] for name, seconds in times.items()}
    return milliseconds | {"finished": finished, "failed": failed, "tokens": tokens}


async def seconds_to_token(bench: Workbench, data: str | None, name: str, version: int) -> float:
    """From asking until the first token of that version is there."""
    (request,) = bench.requests(name, data, 1, SamplingParams(max_tokens=1))
    began = time.perf_counter()
    (completion,) = await bench.engine.generate(replace(request, n=1, model=POLICY, traffic="serving"))
    seconds = time.perf_counter() - began
    answered = {span.version for span in completion.weight_versions}
    assert answered == {version}, f"version {version} was published, and {answered} answered"
    return seconds


async def next_step(ticks: asyncio.Condition) -> None:
    async with ticks:
        await ticks.wait()


async def request_until(
    bench: Workbench, prompt: GenerationRequest, over: asyncio.Event, ticks: asyncio.Condition
) -> tuple[int, int, int]:
    """One request after the other, `ticks` for each token; requests finished, requests failed, tokens."""
    finished = failed = tokens = 0
    while not over.is_set():
        name = f"{prompt.request_id}-{finished + failed}"
        request = replace(prompt, request_id=name, n=1, model=POLICY, traffic="serving")
        try:
            async for event in bench.engine.stream(request):
                tokens += len(event.tokens)
                async with ticks:
                    ticks.notify_all()
            finished += 1
        except ParallmError:
            failed += 1
    return finished, failed, tokens
