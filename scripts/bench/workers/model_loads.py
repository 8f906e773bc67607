"""Seconds between tokens of one stream of nano, alone and while a larger model loads beside it."""

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import patch

from mlx_lm.utils import save_model

import bench
from bench.workers.loads import SHAPES
from bench.workers.random_model import random_base
from parallm.config.schema import ServeConfig
from parallm.device.thread import DeviceThread
from parallm.engine.async_engine import AsyncEngine
from parallm.model import load
from parallm.model.shared_model import SharedModel
from parallm.registry.settings import RegistrySettings
from parallm.run.serve import open_serving
from parallm.server.operation.http_server import local_only
from parallm.server.settings import ServerSettings
from parallm.types import BASE, GenerationRequest, SamplingParams

SHAPE = {**SHAPES["25m"], "num_hidden_layers": 32, "vocab_size": 384}
"""The model that is loaded: 400 MB in float32."""
SECONDS_ALONE = 3.0
END_TOKEN = 1


async def main(*, loads: int, is_whole: bool) -> dict[str, list[float]]:
    """`is_whole`: the whole load is one call, as a control."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "models" / "loaded"
        write_folder(folder)
        server = ServerSettings(enabled=True)
        registry = RegistrySettings(enabled=True, folder=f"{name}/registry", folders=(str(folder.parent),))
        config = ServeConfig(server=server, registry=registry)
        queue = in_one_call if is_whole else DeviceThread.load
        with patch.object(DeviceThread, "load", queue):
            async with open_serving(config, bench.BLAS, local_only(server), folder=None) as serving:
                pool = serving.application.pool
                assert pool is not None
                gaps: dict[str, list[float]] = {"alone": [], "loading": []}
                phase = [""]
                streaming = asyncio.create_task(stream(serving.runtime.engine, gaps, phase))
                for _ in range(loads):
                    phase[0] = "alone"
                    await asyncio.sleep(SECONDS_ALONE)
                    phase[0] = "loading"
                    await pool.load("loaded")
                    phase[0] = ""
                    await pool.unload("loaded")
                streaming.cancel()
                await asyncio.wait((streaming,))
    return gaps


def in_one_call(device: DeviceThread, units: Iterator[SharedModel | None]) -> Future[SharedModel]:
    return device.call(lambda: load.last(units))


def write_folder(folder: Path) -> None:
    save_model(folder, random_base(SHAPE))
    (folder / "config.json").write_text(json.dumps(SHAPE))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(load.NANO / name, folder)


async def stream(engine: AsyncEngine, gaps: dict[str, list[float]], phase: list[str]) -> None:
    """Sample without an end; note the time before each token that belongs to a phase."""
    number, last, before = 0, time.perf_counter(), ""
    while True:
        number += 1
        sampling = SamplingParams(max_tokens=1000, temperature=1.0, seed=number, logit_bias=((END_TOKEN, -100.0),))
        request = GenerationRequest(
            request_id=f"stream-{number}", model=BASE, prompt_tokens=(5, 6, 7), sampling=sampling, traffic="serving"
        )
        async for event in engine.stream(request):
            now = time.perf_counter()
            # a gap belongs to the phase in which it began or ended, whichever is a load
            of = "loading" if "loading" in (before, phase[0]) else phase[0]
            if of and event.tokens:
                gaps[of].append((now - last) / len(event.tokens))
            last, before = now, phase[0]
