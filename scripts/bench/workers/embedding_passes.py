"""Seconds in which the encoder makes vectors of random rows, in passes of a number of tokens, with random weights of a
shape; and those of its matrix products alone."""

import random
import time
from collections.abc import Sequence
from typing import Any

from bench.workers.embedding_speed import Row, encode, open_encoder, product_seconds
from bench.workers.workbench import open_workbench
from parallm.model.load import NANO

NUM_PASSES = 8


async def main(*, shape: str, tokens: int, lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    """Rows have `lengths` (shortest, longest). The first repeat warms up."""
    generator, rows = random.Random(0), list[Row]()
    while sum(map(len, rows)) < NUM_PASSES * tokens:
        rows.append(tuple(generator.randrange(3, 300) for _ in range(generator.randint(*lengths))))
    async with open_workbench(shape=shape) as bench:
        encoder = open_encoder(bench, NANO, tokens * bench.streams.width)
        seconds = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            await encode(encoder, rows)
            seconds.append(time.perf_counter() - began)
        products = await bench.on_device(lambda: product_seconds(bench, tokens))
    return {"seconds": seconds[1:], "products": products * sum(map(len, rows))}
