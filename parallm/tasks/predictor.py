"""Named arrays through the language model: token ids -> logits, hidden states and pooled states.

A row is computed as it is alone: padding is cut off before, and rows are packed as vectors are (`passes.py`).
Axes: N rows, T tokens of the longest row, M tokens of a pass, H hidden, V vocabulary.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import numpy as np

from parallm.device.streams import DeviceStreams
from parallm.device.thread import DeviceThread
from parallm.errors import ContextTooLong, EngineFull, InvalidRequest, NotFinite, Unavailable, UnknownModel
from parallm.learner.passes.packing import can_pack
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.tasks.encoder import Encoder
from parallm.tasks.passes import Passes, Row
from parallm.tensors import Array, Arrays, Signature, TensorSpec
from parallm.types import EncodeRequest, TaskSpec

IDS, MASK = "input_ids", "attention_mask"
LOGITS, HIDDEN, POOLED = "logits", "last_hidden_state", "pooled"


@dataclass(frozen=True, slots=True)
class _Form:
    """What only a forward shows."""

    hidden: int
    packs: bool


class Predictor:
    """The base and its adapters as functions of arrays. Used on the asyncio thread; passes run on the device thread."""

    def __init__(
        self,
        device: DeviceThread,
        streams: DeviceStreams,
        model: SharedModel,
        adapters: AdapterTable,
        encoder: Encoder,
        *,
        max_context: int,
        max_waiting: int,
    ) -> None:
        self._device = device
        self._streams = streams
        self._model = model
        self._adapters = adapters
        self._encoder = encoder
        self._max_context = max_context
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._form: _Form | None = None  # found by the first request
        self._fault = encoder.fault
        if model.parallel is not None:
            self._fault = "a base that is divided between devices takes no tensors; serve it on one device"

    async def prepare(self) -> None:
        """Learn the sizes of the signature, which takes forwards of a few tokens the first time."""
        if self._form is None and self._fault is None:
            self._form = await asyncio.wrap_future(self._device.call(partial(_form, self._model)))

    def signature(self, model: str) -> Signature:
        """Return the inputs and outputs of an exact version, after `prepare`. Raises UnknownModel, Unavailable."""
        if self._fault is not None:
            raise Unavailable(self._fault)
        assert self._form is not None, "prepared before"
        adapter = self._adapters.resolve(model)
        states = (-1, -1, self._form.hidden)
        outputs = [TensorSpec(name=HIDDEN, datatype="FP32", shape=states)]
        if self._model.writes_text and (adapter is None or adapter.spec is None):
            logits = (-1, -1, self._model.vocabulary_size)
            outputs.insert(0, TensorSpec(name=LOGITS, datatype="FP32", shape=logits))
        if (spec := self._pooling(model)) is not None:
            size = len(spec.pooling) * self._form.hidden
            outputs.append(TensorSpec(name=POOLED, datatype="FP32", shape=(-1, size)))
        ids = TensorSpec(name=IDS, datatype="INT64", shape=(-1, -1))
        return Signature(inputs=(ids, replace(ids, name=MASK, is_optional=True)), outputs=tuple(outputs))

    async def predict(self, model: str, inputs: Arrays, outputs: Sequence[str]) -> Arrays:
        """Return these outputs, float32; at tokens that the mask leaves out they are zeros.

        Cancelling the caller ends the work after a pass. Raises UnknownModel, InvalidRequest, EngineFull, NotFinite.
        """
        rows, real_NT = self._rows(inputs)
        if self._num_waiting >= self._max_waiting:
            raise EngineFull(f"{self._num_waiting} requests for tensors wait; send this one again later")
        self._num_waiting += 1
        try:
            found: dict[str, Array] = {}
            if POOLED in outputs:
                found[POOLED] = await self._pooled(model, rows)
            if of_tokens := [name for name in outputs if name != POOLED]:
                units = self._units(model, rows, of_tokens)
                made = await asyncio.wrap_future(self._device.encode(units))
                assert made is not None, "units end with the states"
                found |= {name: _placed(parts, real_NT) for name, parts in made.items()}
        finally:
            self._num_waiting -= 1
        for name, array in found.items():
            if not np.isfinite(array).all():
                raise NotFinite(f"{model} computes values that are not finite: {name}")
        return found

    def _pooling(self, model: str) -> TaskSpec | None:
        """Return how `model` pools; None: it makes no vectors."""
        try:
            spec = self._encoder.spec(model)
        except Unavailable:
            return None
        return spec if spec.task == "embed" and not spec.dense else None

    def _rows(self, inputs: Arrays) -> tuple[tuple[Row, ...], Array]:
        """Return the token ids of each row, and where they stand (N, T). Raises InvalidRequest."""
        ids_NT = inputs[IDS]
        mask_NT = inputs.get(MASK, np.ones_like(ids_NT))
        if mask_NT.shape != ids_NT.shape:
            raise InvalidRequest(f"{MASK} has the shape {list(mask_NT.shape)}, and {IDS} {list(ids_NT.shape)}", MASK)
        if not ((mask_NT == 0) | (mask_NT == 1)).all():
            raise InvalidRequest(f"{MASK} should hold 0 and 1 alone", MASK)
        real_NT = mask_NT == 1
        edges_N = np.abs(np.diff(mask_NT, axis=1, prepend=0, append=0)).sum(axis=1)
        if (edges_N != 2).any():
            row = int((edges_N != 2).argmax())
            raise InvalidRequest(f"{MASK} of row {row} should have its ones side by side, at least one", MASK)
        size = self._model.vocabulary_size
        if ((ids_NT < 0) | (ids_NT >= size))[real_NT].any():
            raise InvalidRequest(f"token ids should be from 0 to {size - 1}, this model's vocabulary", IDS)
        longest = int(real_NT.sum(axis=1).max())
        if longest > self._max_context:
            raise ContextTooLong(
                f"a row has {longest} tokens and the model's maximum context length is {self._max_context}; shorten it",
                IDS,
                setting="engine.max_context",
            )
        return tuple(tuple(ids_T[real_T].tolist()) for ids_T, real_T in zip(ids_NT, real_NT, strict=True)), real_NT

    async def _pooled(self, model: str, rows: tuple[Row, ...]) -> Array:
        spec = self._pooling(model)
        if spec is None:  # since the request was read
            raise UnknownModel(f"{model} makes no vectors any more")
        end = self._encoder.end_token(spec)
        if end is not None and any(row[-1] != end for row in rows):
            raise InvalidRequest(f"this model's texts end with the token {end}: {POOLED} needs rows that do", IDS)
        return await self._encoder.encode(EncodeRequest(model=model, rows=rows))

    def _units(
        self, model: str, rows: Sequence[Row], names: Sequence[str]
    ) -> Iterator[Mapping[str, list[Array]] | None]:
        """Yield None after each round of passes, the states of each row's tokens by output last."""
        assert self._form is not None, "prepared before"
        passes = Passes(
            model=self._model,
            streams=self._streams,
            spec=TaskSpec(pooling=("last",), source="tokens"),
            lora=self._encoder.binding(self._adapters.resolve(model)),
            head=None,
            packs=self._form.packs,
            budget=self._encoder.budget,
        )
        found: dict[str, list[Array]] = {name: [np.empty(0)] * len(rows) for name in names}
        for indices, parts in passes.token_units(rows, names):
            for name, state_MD in parts.items():
                ends = np.cumsum([len(rows[index]) for index in indices])[:-1]
                for index, part_TD in zip(indices, np.split(state_MD, ends), strict=True):
                    found[name][index] = part_TD
            yield None
        yield found


def _form(model: SharedModel) -> _Form:
    hidden = model.hidden(mx.zeros((1, 1), mx.int32), model.make_cache(), None).shape[-1]
    return _Form(hidden, can_pack(model))


def _placed(parts: Sequence[Array], real_NT: Array) -> Array:
    """Return the states of all rows (N, T, D), zeros where there is no token."""
    placed_NTD = np.zeros((*real_NT.shape, parts[0].shape[-1]), np.float32)
    placed_NTD[real_NT] = np.concatenate(parts)
    return placed_NTD
