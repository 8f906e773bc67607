"""Tokens/s of some streams: of the engine alone, over HTTP with each token at once, and over HTTP as it comes."""

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from bench.workers.workbench import Workbench, open_workbench
from parallm.reports import TrainingStatus
from parallm.server.app import create_app
from parallm.server.operation.http_server import HttpServer
from parallm.server.operation.sockets import bind
from parallm.server.service import Service
from parallm.server.settings import ServerSettings
from parallm.types import BASE, GenerationRequest, SamplingParams

READER = Path(__file__).with_name("stream_reader.py")


async def main(
    *,
    model: str,
    data: str | None,
    shape: str | None,
    streams: int,
    max_tokens: int,
    rounds: int,
    tokenizer: str | None = None,
) -> Mapping[str, Sequence[float]]:
    """`tokenizer`: the folder of that of a shape; the embedded model's by default, which has texts for few tokens."""
    async with open_workbench(model=model, shape=shape, tokenizer=tokenizer) as bench:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        requests = bench.requests("speed", data, streams, sampling, n=1)
        lengths = [len(request.prompt_tokens) for request in requests]
        return await measure(bench, requests, rounds) | {"prompt_lengths": lengths}


async def measure(bench: Workbench, requests: Sequence[GenerationRequest], rounds: int) -> dict[str, list[float]]:
    every = await start_server(bench, ServerSettings(port=0, drain_seconds=0, coalesce_ms=0))
    coalesced = await start_server(bench, ServerSettings(port=0, drain_seconds=0))
    speeds: dict[str, list[float]] = {"engine": [], "every_token": [], "coalesced": []}
    while await bench.on_device(bench.core.prepare):  # as the device thread does while no request comes
        pass
    for number in range(rounds + 1):
        speeds["engine"].append(await engine_speed(bench, str(number), requests))
        speeds["every_token"].append(await http_speed(every, requests))
        speeds["coalesced"].append(await http_speed(coalesced, requests))
    await every.stop()
    await coalesced.stop()
    return {name: counted for name, (_, *counted) in speeds.items()}  # the first round warms up


async def start_server(bench: Workbench, settings: ServerSettings) -> HttpServer:
    app = create_app(
        Service(
            engine=bench.engine,
            tokenizer=bench.model.tokenizer,
            catalog=bench.table.cards,
            status=lambda: TrainingStatus(state="serving"),
            settings=settings,
            base_name="bench",
        )
    )
    server = HttpServer(app, bind(settings), settings)
    await server.start()
    return server


async def engine_speed(bench: Workbench, name: str, requests: Sequence[GenerationRequest]) -> float:
    """Tokens of the streams are only counted."""

    async def one(request: GenerationRequest) -> int:
        own = replace(request, request_id=f"{name}-{request.request_id}", traffic="serving")
        return sum([len(event.tokens) async for event in bench.engine.stream(own)])

    began = time.perf_counter()
    counts = await asyncio.gather(*map(one, requests))
    return sum(counts) / (time.perf_counter() - began)


async def http_speed(server: HttpServer, requests: Sequence[GenerationRequest]) -> float:
    max_tokens = requests[0].sampling.max_tokens
    body = {"model": BASE, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    bodies = [body | {"prompt": list(request.prompt_tokens)} for request in requests]
    reader = await asyncio.create_subprocess_exec(
        sys.executable,
        str(READER),
        str(urlsplit(server.url).port),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await reader.communicate(json.dumps(bodies).encode())
    seconds = json.loads(told)["seconds"]
    return len(bodies) * max_tokens / float(seconds)
