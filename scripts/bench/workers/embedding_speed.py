"""Seconds in which the encoder makes vectors of texts, and those of its matrix products alone.

Products: each linear layer of the base once for as many rows as a pass has tokens, on all streams at the same time.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from bench.workers.workbench import Workbench, open_workbench
from parallm.engine.prefill import chunk_tokens
from parallm.engine.settings import EngineSettings
from parallm.model.load import find_folder
from parallm.model.lora.linear import LoraLinear
from parallm.tasks.encoder import Encoder
from parallm.tasks.settings import TaskSettings
from parallm.types import BASE, EncodeRequest

SHOWN = 4
"""Vectors that are returned, for a comparison with those of others."""
PRODUCT_REPEATS = 5
Row = tuple[int, ...]


async def main(*, model: str, file: str, first: int, count: int) -> dict[str, Any]:
    """Texts `first` to `first + count` of a JSON list, from text to vector."""
    texts, unit_tokens = json.loads(Path(file).read_text()), chunk_tokens(EngineSettings())
    async with open_workbench(model=model) as bench:
        encoder = open_encoder(bench, find_folder(model), unit_tokens)
        spec = encoder.spec(BASE)
        await encode(encoder, [encoder.encode_text(text, spec) for text in texts[:16]])
        began = time.perf_counter()
        rows = [encoder.encode_text(text, spec) for text in texts[first : first + count]]
        vectors = await encode(encoder, rows)
        seconds = time.perf_counter() - began
        tokens = sum(map(len, rows))
        products = await bench.on_device(lambda: product_seconds(bench, unit_tokens // bench.streams.width))
    return {"seconds": seconds, "tokens": tokens, "products": products * tokens, "vectors": vectors[:SHOWN].tolist()}


def open_encoder(bench: Workbench, folder: Path, unit_tokens: int) -> Encoder:
    parts = bench.device, bench.streams, bench.model, bench.table, TaskSettings(pooling="mean"), folder
    return Encoder(*parts, unit_tokens=unit_tokens, max_waiting=1)


async def encode(encoder: Encoder, rows: Sequence[Row]) -> Any:
    return await encoder.encode(EncodeRequest(model=BASE, rows=tuple(rows)))


def product_seconds(bench: Workbench, tokens: int) -> float:
    """Seconds of a token's matrix products: the fastest of some repeats of a pass on each stream. Device thread."""
    layers = [module for module in bench.model.base.modules() if isinstance(module, LoraLinear)]
    inputs = {bench.model.targets[layer.target][0] for layer in layers}
    given = {size: mx.random.normal((tokens, size)).astype(bench.model.dtype) for size in inputs}
    mx.eval(given)
    found = []
    for _ in range(PRODUCT_REPEATS):
        began = time.perf_counter()
        for layer in layers:
            x = given[bench.model.targets[layer.target][0]]
            # started at once and not kept, so that no more than a few outputs need memory
            mx.async_eval(bench.streams.run(layer.linear, [x] * bench.streams.width))
        for stream in bench.streams.handles:
            mx.synchronize(stream)
        found.append(time.perf_counter() - began)
    return min(found) / (tokens * bench.streams.width)
