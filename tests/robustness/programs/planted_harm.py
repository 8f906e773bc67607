"""`python -m parallm.train` that does wrong what test_hostile.py must see: an answer, a delay, a row that is lost."""

import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallm.config.schema import RunConfig
from parallm.device.blas import BlasReport
from parallm.metrics.json_lines import JsonLines
from parallm.run.command import run_command
from parallm.server.dialects import routes_tokenize
from parallm.types import TokenEvent

FREEZE_SECONDS = 4.0
WRONG_ONE = 40
"""Every so many streams one is wrong."""
LOST_STEP = 3

append, check_text = JsonLines.append, routes_tokenize.check_text


def harmful(config: RunConfig, folder: Path, blas: BlasReport) -> int:
    from parallm.engine.async_engine import AsyncEngine  # noqa: PLC0415  # MLX takes the BLAS that there is by now
    from parallm.run.train import run_training  # noqa: PLC0415

    stream = AsyncEngine.stream
    num_streams = 0

    async def wrong(engine: AsyncEngine, request: Any) -> AsyncGenerator[TokenEvent, None]:
        nonlocal num_streams
        num_streams += 1
        is_wrong = num_streams % WRONG_ONE == 0
        async for event in stream(engine, request):
            yield replace(event, tokens=tuple(token ^ 1 for token in event.tokens)) if is_wrong else event

    AsyncEngine.stream = wrong  # type: ignore[method-assign]
    return run_training(config, folder, blas)


def losing(lines: JsonLines, *rows: Any) -> None:
    append(lines, *(row for row in rows if row["step"] != LOST_STEP))


def freezing(text: str, *rest: Any) -> None:
    if text == "freeze":
        time.sleep(FREEZE_SECONDS)
    check_text(text, *rest)


JsonLines.append = losing  # type: ignore[method-assign]
routes_tokenize.check_text = freezing
sys.path.insert(0, "")  # as `python -m` does: scoring functions are in the folder of the run
sys.exit(run_command("train", harmful))
