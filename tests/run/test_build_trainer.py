"""Wiring that no run shows."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from parallm.config.schema import RunConfig
from parallm.distributed.parts import Single
from parallm.run.build_trainer import _rollouts


def test_completions_are_written_while_the_device_decodes_nothing(tmp_path: Path) -> None:
    async def seen() -> list[bool]:
        runtime: Any = SimpleNamespace(
            device=SimpleNamespace(is_decoding=True), model=SimpleNamespace(tokenizer=SimpleNamespace(decode_rows=list))
        )
        spec: Any = SimpleNamespace(config=RunConfig(), folder=tmp_path)
        async with AsyncExitStack() as sources:
            record = _rollouts(spec, runtime, sources, Single())
            assert record is not None
            found = [record._writer._is_decoding()]
            runtime.device.is_decoding = False
            return [*found, record._writer._is_decoding()]

    assert asyncio.run(seen()) == [True, False]
