"""Rows of token ids -> vectors, on the shared base or through one of its adapters.

Rows are packed as in training (`learner.passes.packing`), so a row's numbers do not depend on the rows beside it. Work
is cut into passes, a traffic class of the governor of its own: no answer that streams waits for a whole request.
Axes: N rows, M tokens of a pass, D numbers of a vector.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from parallm.device.streams import DeviceStreams
from parallm.device.thread import DeviceThread
from parallm.errors import EngineFull, InvalidRequest, ModelError, NotFinite, Unavailable
from parallm.learner.passes.batch import make_passes
from parallm.learner.passes.packing import Segment, can_pack, packed_hidden
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.single import single_lora
from parallm.model.shared_model import SharedModel
from parallm.model.task_spec import adds_end_token, check_causal, read_task_spec
from parallm.tasks.pooling import pool
from parallm.tasks.settings import TaskSettings
from parallm.types import EncodeRequest, TaskSpec

PROBE = "a"
NO_SPEC = (
    "{model} makes no vectors: nothing says how to pool its hidden states. Set tasks.pooling=last or mean as it was "
    "trained, load a model whose folder has a modules.json, or name an adapter that makes vectors"
)


class Encoder:
    """Makes vectors of token ids. Used on the asyncio thread; passes run on the device thread."""

    def __init__(
        self,
        device: DeviceThread,
        streams: DeviceStreams,
        model: SharedModel,
        adapters: AdapterTable,
        settings: TaskSettings,
        folder: Path,
        *,
        unit_tokens: int,
        max_waiting: int,
    ) -> None:
        """`folder` is the base's. A unit of device work has at most `unit_tokens` tokens, or one row for each stream;
        more than `max_waiting` requests at once are refused."""
        self._device = device
        self._streams = streams
        self._model = model
        self._adapters = adapters
        self._budget = max(1, unit_tokens // streams.width)
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._form: _Form | None = None  # found by the first request: it takes a forward
        self._bound: tuple[Adapter, LoraBinding] | None = None  # the newest; DoRA's takes a pass over the base
        self._settings = settings
        self._base: TaskSpec | None = None
        self._refusal, self._fault = NO_SPEC.format(model=model.name), _fault(model, folder)
        try:
            self._base = _base_spec(folder, settings)
        except ModelError as error:
            self._refusal = f"{model.name} makes no vectors: {error}"
        self._end_token = _end_token(model, folder, settings)

    @property
    def vocabulary_size(self) -> int:
        return self._model.vocabulary_size

    def spec(self, model: str) -> TaskSpec:
        """How `model` makes vectors: as its adapter says, else as the base. Raises UnknownModel, Unavailable."""
        adapter = self._adapters.resolve(model)
        if self._fault is not None:
            raise Unavailable(self._fault)
        if self._model.parallel is not None:
            raise Unavailable("a base that is divided between devices makes no vectors; serve it on one device")
        spec = self._base if adapter is None or adapter.task is None else adapter.task
        if spec is None:
            raise Unavailable(self._refusal)
        if "last" in spec.pooling and self._end_token is None and self._settings.end_token is None:
            raise Unavailable(
                f"{model} pools the last token, and the tokenizer of {self._model.name} ends texts by none; set "
                "tasks.end_token=append, or none if the model was trained so"
            )
        return spec

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of a text as the model reads it: with the tokenizer's special tokens, and its end token."""
        tokens = self._model.tokenizer.encode(text)
        end = self._end_token
        return tokens if end is None or tokens[-1:] == (end,) else (*tokens, end)

    def end_token(self, spec: TaskSpec) -> int | None:
        """The token that every row has to end with; None: any."""
        return self._end_token if "last" in spec.pooling else None

    async def encode(self, request: EncodeRequest) -> np.ndarray:
        """Vectors (N, D), float32, in the order of the rows; cancelling the caller ends the work after a pass.

        Raises UnknownModel, Unavailable, InvalidRequest for `dimensions` that it was not trained for, EngineFull,
        NotFinite.
        """
        if self._form is None:
            self._form = await asyncio.wrap_future(self._device.call(partial(_form, self._model)))
        spec, adapter = self.spec(request.model), self._adapters.resolve(request.model)
        _check_dimensions(request, spec, len(spec.pooling) * self._form.hidden)
        if self._num_waiting >= self._max_waiting:
            raise EngineFull(f"{self._num_waiting} requests for vectors wait; send this one again later")
        self._num_waiting += 1
        try:
            units = self._units(request.rows, adapter, spec)
            vectors_ND = await asyncio.wrap_future(self._device.encode(units))
        finally:
            self._num_waiting -= 1
        assert vectors_ND is not None, "encoding ends with the vectors"
        if not np.isfinite(vectors_ND).all():
            raise NotFinite(f"{request.model} computes values that are not finite for one of the inputs")
        vectors_ND = vectors_ND[:, : request.dimensions]
        return normalized(vectors_ND) if request.normalizes and spec.normalizes else vectors_ND

    def _units(
        self, rows: Sequence[tuple[int, ...]], adapter: Adapter | None, spec: TaskSpec
    ) -> Iterator[np.ndarray | None]:
        """Yield None after each round of passes, all vectors last."""
        lora = self._binding(adapter)
        vectors: list[np.ndarray | None] = [None] * len(rows)
        passes = make_passes([len(row) for row in rows], self._budget, self._streams.width)
        for start in range(0, len(passes), self._streams.width):
            chosen = passes[start : start + self._streams.width]
            pooled = self._streams.run(lambda indices: self._pooled([rows[i] for i in indices], lora, spec), chosen)
            mx.eval(pooled)
            for indices, vectors_SD in zip(chosen, pooled, strict=True):
                for index, vector_D in zip(indices, np.array(vectors_SD), strict=True):
                    vectors[index] = vector_D
            yield None
        yield np.stack([vector for vector in vectors if vector is not None])

    def _pooled(self, rows: Sequence[tuple[int, ...]], lora: LoraBinding | None, spec: TaskSpec) -> mx.array:
        lengths = [len(row) for row in rows]
        assert self._form is not None, "found before the first pass"
        if self._form.packs:
            tokens_M = np.concatenate([np.asarray(row, np.int32) for row in rows])
            segments = [Segment(prompt=length) for length in lengths]
            return pool(packed_hidden(self._model, mx.array(tokens_M), segments, lora), lengths, spec.pooling)
        hidden = [self._model.hidden(mx.array([row]), self._model.make_cache(), lora)[0, ...] for row in rows]
        return pool(mx.concatenate(hidden), lengths, spec.pooling)

    def _binding(self, adapter: Adapter | None) -> LoraBinding | None:
        if adapter is None:
            return None
        if self._bound is None or self._bound[0] is not adapter:
            self._bound = adapter, single_lora(dict(adapter.arrays), lora_scaling(adapter, self._model))
        return self._bound[1]


def normalized(vectors_ND: np.ndarray) -> np.ndarray:
    """Vectors of length 1, float32; zeros stay zeros. Each row's numbers are its own."""
    lengths_N1 = np.linalg.norm(vectors_ND.astype(np.float64), axis=1, keepdims=True)
    scaled_ND: np.ndarray = (vectors_ND / np.maximum(lengths_N1, 1e-12)).astype(np.float32)
    return scaled_ND


def _base_spec(folder: Path, settings: TaskSettings) -> TaskSpec | None:
    """The spec by the settings, else by the files of the base. Raises ModelError."""
    if settings.pooling is not None:
        spec: TaskSpec | None = TaskSpec(pooling=(settings.pooling,), source="tasks.pooling")
    else:
        spec = read_task_spec(folder)
    return replace(spec, dimensions=()) if spec is not None and settings.matryoshka else spec


def _end_token(model: SharedModel, folder: Path, settings: TaskSettings) -> int | None:
    """The token that ends every text of the base; None if texts end as they are."""
    if settings.end_token is not None:
        return model.tokenizer.end_token if settings.end_token == "append" else None
    plain, whole = model.tokenizer.encode_more(PROBE), model.tokenizer.encode(PROBE)
    if whole[-1:] != plain[-1:]:
        return whole[-1]
    return model.tokenizer.end_token if adds_end_token(folder) else None


def _fault(model: SharedModel, folder: Path) -> str | None:
    """Why neither the base nor any adapter makes vectors."""
    if model.trunk_owner is None:
        return f"{model.name} cannot be split into trunk and head, so it has no hidden states to pool"
    try:
        check_causal(folder)
    except ModelError as error:
        return f"{model.name} makes no vectors: {error}"
    return None


@dataclass(frozen=True, slots=True)
class _Form:
    """What only a forward shows."""

    packs: bool
    hidden: int


def _form(model: SharedModel) -> _Form:
    hidden = model.hidden(mx.zeros((1, 1), mx.int32), model.make_cache(), None).shape[-1]
    return _Form(can_pack(model), hidden)


def _check_dimensions(request: EncodeRequest, spec: TaskSpec, size: int) -> None:
    """Raise InvalidRequest unless vectors of `size` numbers may be cut as the request asks."""
    asked = request.dimensions
    if asked is None or asked == size:
        return
    if asked > size:
        raise InvalidRequest(f"dimensions is {asked}, and vectors of {request.model} have {size}", "dimensions")
    if spec.dimensions is None:
        raise InvalidRequest(
            f"{request.model} was not trained for shorter vectors: leave dimensions out or send {size}; if it was "
            "(Matryoshka), start the server with tasks.matryoshka=true",
            "dimensions",
        )
    if spec.dimensions and asked not in spec.dimensions:
        sizes = ", ".join(map(str, sorted({*spec.dimensions, size})))
        raise InvalidRequest(f"dimensions is {asked}, and {request.model} knows {sizes}", "dimensions")
