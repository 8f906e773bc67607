"""`python -m parallm.train` that does wrong what test_hostile.py must see: an answer, a delay, a row that is lost."""

import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import parallm.train as train
from parallm.config.schema import RunConfig
from parallm.device.blas import BlasReport
from parallm.metrics.json_lines import JsonLines
from parallm.server.dialects import routes_generate
from parallm.types import TokenEvent

FREEZE_SECONDS = 4.0
WRONG_ONE = 40
"""Every so many streams one is wrong."""
LOST_STEP = 3

run, append, check_text = train.run, JsonLines.append, routes_generate.check_text


def harmful(config: RunConfig, folder: Path, blas: BlasReport) -> int:
    from parallm.engine.async_engine import AsyncEngine  # noqa: PLC0415  # MLX takes the BLAS that there is by now

    stream = AsyncEngine.stream
    num_streams = 0

    async def wrong(engine: AsyncEngine, request: Any) -> AsyncGenerator[TokenEvent, None]:
        nonlocal num_streams
        num_streams += 1
        is_wrong = num_streams % WRONG_ONE == 0
        async for event in stream(engine, request):
            yield replace(event, tokens=tuple(token ^ 1 for token in event.tokens)) if is_wrong else event

    AsyncEngine.stream = wrong  # type: ignore[method-assign]
    return run(config, folder, blas)


def losing(lines: JsonLines, *rows: Any) -> None:
    append(lines, *(row for row in rows if row["step"] != LOST_STEP))


def freezing(text: str, *rest: Any) -> None:
    if text == "freeze":
        time.sleep(FREEZE_SECONDS)
    check_text(text, *rest)


train.run = harmful
JsonLines.append = losing  # type: ignore[method-assign]
routes_generate.check_text = freezing
sys.path.insert(0, "")  # as `python -m` does: scoring functions are in the folder of the run
train.main()
