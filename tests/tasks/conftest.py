"""An encoder whose device is the thread of the test."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallm.device.streams import DeviceStreams
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.tasks.encoder import Encoder
from parallm.tasks.settings import TaskSettings
from parallm.types import EncodeRequest

MEAN = TaskSettings(pooling="mean", matryoshka=True)
Row = tuple[int, ...]


class Device:
    """Runs everything at once, in the thread of the test."""

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001  raised where the future is awaited
            future.set_exception(error)
        return future

    def encode(self, units: Iterator[Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.units = list(units)
        future.set_result(self.units[-1])
        return future


def build_encoder(
    model: SharedModel,
    folder: Path,
    streams: DeviceStreams,
    settings: TaskSettings = MEAN,
    *,
    adapters: Sequence[Adapter] = (),
    unit_tokens: int = 64,
    max_waiting: int = 9,
) -> Encoder:
    table, device = AdapterTable(), Device()
    for adapter in adapters:
        table.publish(adapter)
    return Encoder(
        device,  # type: ignore[arg-type]
        streams,
        model,
        table,
        settings,
        folder,
        unit_tokens=unit_tokens,
        max_waiting=max_waiting,
    )


@pytest.fixture
def make_encoder(
    tiny_model: Callable[[str], Path], load_tiny: Callable[..., SharedModel], streams: DeviceStreams
) -> Callable[..., Encoder]:
    def make(
        architecture: str = "llama",
        settings: TaskSettings = MEAN,
        *,
        folder: Path | None = None,
        model: SharedModel | None = None,
        **options: Any,
    ) -> Encoder:
        where = folder or tiny_model(architecture)
        return build_encoder(model or load_tiny(architecture), where, streams, settings, **options)

    return make


def encode(encoder: Encoder, rows: Sequence[Row], model: str = "base", **fields: Any) -> np.ndarray:
    return asyncio.run(encoder.encode(EncodeRequest(model=model, rows=tuple(rows), **fields)))
