"""Runs a worker after its BLAS: `python -m bench.worker NAME '{"keyword": "value"}'`. MLX takes the BLAS that is
loaded.

NAME is a module of `bench/workers`, or any other by its whole name.

`blas` and `strict` among the keywords choose the BLAS. In an environment without parallm the path of the library comes
in the variable BENCH_BLAS_LIBRARY; an empty one leaves MLX its own. Prints what the worker's main returns, or each of
what it yields, as a line of JSON.
"""

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator

import bench

LIBRARY = os.environ.get("BENCH_BLAS_LIBRARY")


def main() -> None:
    name, keywords = sys.argv[1], json.loads(sys.argv[2])
    blas, is_strict = keywords.pop("blas", "auto"), keywords.pop("strict", True)
    if LIBRARY is None:
        from parallm.device.blas import load_blas  # noqa: PLC0415  # peers' environments have no parallm
        from parallm.device.settings import DeviceSettings  # noqa: PLC0415

        bench.BLAS = load_blas(DeviceSettings(blas=blas, blas_strict=is_strict))
    elif LIBRARY:
        ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
    result = importlib.import_module(name if "." in name else f"bench.workers.{name}").main(**keywords)
    if inspect.isasyncgen(result):
        asyncio.run(print_all(result))
        return
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    for part in result if isinstance(result, Iterator) else [result]:
        print(json.dumps(part), flush=True)


async def print_all(parts: AsyncIterator[object]) -> None:
    async for part in parts:
        print(json.dumps(part), flush=True)


main()
