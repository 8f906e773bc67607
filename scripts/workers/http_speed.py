"""Tokens/s of `prompts` streams: of the engine alone, over HTTP with each token at once, and over HTTP as it comes."""

import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from job import Job, read_job
from workbench import Workbench, open_workbench

from parallm.reports import TrainingStatus
from parallm.server.app import create_app
from parallm.server.operation.http_server import HttpServer
from parallm.server.operation.sockets import bind
from parallm.server.service import Service
from parallm.server.settings import ServerSettings
from parallm.types import BASE, SamplingParams

READER = Path(__file__).parent.parent / "stream_reader.py"


async def measure(job: Job) -> dict[str, list[float]]:
    bench = await open_workbench(replace(job, group_size=1))
    every = await start_server(bench, ServerSettings(port=0, drain_seconds=0, coalesce_ms=0))
    beats = await start_server(bench, ServerSettings(port=0, drain_seconds=0))
    found: dict[str, list[float]] = {"engine": [], "every_token": [], "beats": []}
    await engine_speed(bench, "warm-up")
    for place in range(job.repeats):
        found["engine"].append(await engine_speed(bench, str(place)))
        found["every_token"].append(await http_speed(bench, every))
        found["beats"].append(await http_speed(bench, beats))
    await every.stop()
    await beats.stop()
    bench.close()
    return found


async def start_server(bench: Workbench, settings: ServerSettings) -> HttpServer:
    app = create_app(
        Service(
            engine=bench.engine,
            tokenizer=bench.model.tokenizer,
            catalog=bench.table.cards,
            status=lambda: TrainingStatus(state="serving"),
            settings=settings,
            base_name=bench.job.model,
        )
    )
    server = HttpServer(app, bind(settings), settings)
    await server.start()
    return server


async def engine_speed(bench: Workbench, name: str) -> float:
    """Of streams whose tokens are only counted."""
    sampling = SamplingParams(max_tokens=bench.job.max_tokens, ignore_eos=True)
    requests = [
        replace(request, model=BASE, traffic="serving") for request in bench.requests(name, bench.job.prompts, sampling)
    ]

    async def one(place: int) -> int:
        return sum([len(event.tokens) async for event in bench.engine.stream(requests[place])])

    began = time.perf_counter()
    counts = await asyncio.gather(*(one(place) for place in range(len(requests))))
    return sum(counts) / (time.perf_counter() - began)


async def http_speed(bench: Workbench, server: HttpServer) -> float:
    sampling = SamplingParams(max_tokens=bench.job.max_tokens)
    bodies = [
        {"model": BASE, "prompt": list(request.prompt_tokens), "max_tokens": bench.job.max_tokens, "stream": True}
        | {"ignore_eos": True}
        for request in bench.requests("http", bench.job.prompts, sampling)
    ]
    reader = await asyncio.create_subprocess_exec(
        sys.executable,
        str(READER),
        str(urlsplit(server.url).port),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await reader.communicate(json.dumps(bodies).encode())
    seconds = json.loads(told)["seconds"]
    return len(bodies) * bench.job.max_tokens / float(seconds)


print(json.dumps(asyncio.run(measure(read_job(sys.argv[1])))))
