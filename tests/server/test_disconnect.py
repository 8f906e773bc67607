"""Real sockets and a real engine, whose steps are slowed down so that they can be counted."""

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from parallm.device.governor import Governor
from parallm.device.streams import DeviceStreams
from parallm.device.thread import DeviceThread
from parallm.engine.async_engine import AsyncEngine
from parallm.engine.engine import Engine
from parallm.engine.settings import EngineSettings
from parallm.model.adapters.table import AdapterTable
from parallm.model.load import load_shared_model
from parallm.model.settings import ModelSettings
from parallm.server.operation.http_server import HttpServer
from parallm.server.operation.sockets import bind
from parallm.server.settings import ServerSettings
from parallm.types import TrafficClass
from tests.server.conftest import make_app

SECONDS_OF_A_STEP = 0.06  # long beside what a busy machine lets threads wait


class SlowEngine(Engine):
    steps: list[float]

    def step(self, traffic: TrafficClass) -> None:
        self.steps.append(time.perf_counter())
        time.sleep(SECONDS_OF_A_STEP)
        super().step(traffic)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_rows_within_two_steps(tiny_model: Callable[[str], Path], stream: bool) -> None:
    device = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    try:
        left, steps = asyncio.run(steps_around_leaving(device, str(tiny_model("llama")), stream))
    finally:
        device.stop()
    assert len([step for step in steps if step < left]) > 3
    assert len([step for step in steps if step > left]) <= 2


async def steps_around_leaving(device: DeviceThread, path: str, stream: bool) -> tuple[float, list[float]]:
    """When the client left, and when the steps of the engine began."""
    engine = AsyncEngine(device, asyncio.get_running_loop())
    model = device.call(partial(load_shared_model, ModelSettings(path=path))).result(60)
    streams = device.call(lambda: DeviceStreams(lambda _: None)).result(60)
    build = partial(
        SlowEngine, model, AdapterTable(), streams, EngineSettings(), emit=engine.emit, report=engine.report
    )
    core = device.call(build).result(60)
    core.steps = []
    engine.attach(core)
    app = make_app(engine, model.tokenizer, base_name="tiny")
    server = HttpServer(app, bind(ServerSettings(port=0)), ServerSettings(drain_seconds=0))
    await server.start()
    _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(server.url).port)
    body = {"model": "policy", "prompt": [5, 9, 44], "n": 2, "max_tokens": 100, "stream": stream, "ignore_eos": True}
    text = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n"
    writer.write((head + text).encode())
    while len(core.steps) < 6:
        await asyncio.sleep(0.005)
    writer.transport.abort()
    left = time.perf_counter()
    await asyncio.sleep(10 * SECONDS_OF_A_STEP)
    load = engine.stats()
    await server.stop()
    assert (load.num_running, load.num_waiting) == (0, 0)
    return left, core.steps
