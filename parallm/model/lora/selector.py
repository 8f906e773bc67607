"""Chooses the LoRA implementation of a forward, and keeps the weights that it needs while they are used.

| a forward of | whose rows use | on | runs | in |
|---|---|---|---|---|
| the engine | the base alone | any | no binding | - |
| the engine | versions that pack alike | CUDA | `SegmentedLora`: two kernels for a group of targets | `segmented.py` |
| the engine | one version | any | `SingleLora`: plain products | `single.py` |
| the engine | several versions, or base too | any | `ConcatenatedLora`: one product with all A | `concatenated.py` |
| the learner | the version in training | CUDA | `TrainingLora`: gradients of one input are added | `training.py` |
| the learner | the version in training | CPU | `SingleLora` | `single.py` |
| the learner | the version in training, with dropout | any | `DropoutLora` | `training.py` |

DoRA, and adapters whose targets or ranks differ, do not pack (`pack_lora`). `SegmentedLora`,
`TrainingLora` and forwards of the base run through `MergedLinear`, all others through each `LoraLinear` by itself.
"""

import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from parallm.model.adapters.adapter import Adapter, Key
from parallm.model.kernels.cuda import on_cuda
from parallm.model.lora.concatenated import ConcatenatedLoras, concatenate_loras
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.segmented import (
    NO_ADAPTER,
    PackedLayout,
    PackedLora,
    SegmentedLora,
    order_rows,
    order_tokens,
    pack_lora,
    stack_packed,
)
from parallm.model.lora.single import SingleLora, single_lora
from parallm.model.lora.training import DropoutLora, TrainingLora
from parallm.model.shared_model import SharedModel

MAX_SINGLE = 16
MAX_SETS = 2  # each is a copy of all its adapters, and rows change sets one way
MAX_FLAT = 8  # versions whose A each token of a prompt is multiplied by
MAX_ALONE = 16  # of 84 MB each for rank 16 on all linears of an 8B shape

CacheKey = TypeVar("CacheKey", bound=Hashable)
Value = TypeVar("Value")


def training_lora(adapter: SingleLora, dropout: float, key: mx.array) -> LoraBinding:
    """`adapter` for a forward that is differentiated, with `dropout` of its inputs: each target drops its own.

    With dropout `adapter` must not be widened (`single_lora`).
    """
    if dropout == 0:
        return TrainingLora(adapter) if on_cuda() else adapter
    targets = sorted([*adapter.a_IR, *adapter.experts.b_ERO])
    keys = mx.random.split(key, len(targets))
    split = replace(adapter, joined={}, experts=adapter.experts.apart())  # joined targets would share their input
    return DropoutLora(split, dropout, dict(zip(targets, keys, strict=True)))


class LoraSelector:
    """Chooses the binding of an engine's rows. A packed version costs a launch for each array, a stack a copy, others a
    multiplication per target."""

    def __init__(self, model: SharedModel) -> None:
        self._model = model
        self._singles: OrderedDict[Key, SingleLora] = OrderedDict()
        self._concatenated: OrderedDict[tuple[Key, ...], ConcatenatedLoras] = OrderedDict()
        self._last: tuple[Sequence[Adapter | None], LoraBinding | None] = ((), None)  # rows seldom change
        self._packed = PackedLoraCache(model)

    def select(self, adapters_B: Sequence[Adapter | None]) -> LoraBinding | None:
        """The binding for rows that use `adapters_B` (None: the base)."""
        last_B, lora = self._last
        if len(last_B) != len(adapters_B) or not all(map(operator.is_, last_B, adapters_B)):
            lora = self._select(adapters_B)
            self._last = (tuple(adapters_B), lora)
        return lora

    def can_stack(self, adapters: Sequence[Adapter]) -> bool:
        """Whether `select_flat` computes tokens of these versions together, and at what a few cost."""
        packed = self._packed.of({adapter.key: adapter for adapter in adapters}) if self._model.groups else None
        return packed is not None and packed[0].num_versions <= MAX_FLAT

    def select_flat(
        self, adapters_S: Sequence[Adapter | None], lengths_S: Sequence[int], read_C: Sequence[int] = ()
    ) -> tuple[LoraBinding | None, LoraBinding | None]:
        """The bindings for tokens as rows, `lengths_S[s]` of which use `adapters_S[s]`, and for those at `read_C`.

        There is one adapter where versions do not stack (`can_stack`).
        """
        adapters = {adapter.key: adapter for adapter in adapters_S if adapter is not None}
        packed = self._packed.of(adapters) if adapters and self._model.groups else None
        if packed is None:
            assert all(adapter is adapters_S[0] for adapter in adapters_S), "versions that do not stack"
            lora = self.select([adapters_S[0]] * sum(lengths_S))
            return lora, lora
        weights, index = packed
        index_S = [NO_ADAPTER if adapter is None else index[adapter.key] for adapter in adapters_S]
        index_M = np.repeat(np.array(index_S, np.int32), lengths_S)
        read = _flat_lora(weights, index_M[np.array(read_C)]) if read_C else None
        return _flat_lora(weights, index_M), read

    def _select(self, adapters_B: Sequence[Adapter | None]) -> LoraBinding | None:
        keys_B = [None if adapter is None else adapter.key for adapter in adapters_B]
        adapters = {key: adapter for key, adapter in zip(keys_B, adapters_B, strict=True) if key and adapter}
        if not adapters:
            return None
        packed = self._packed.of(adapters) if self._model.groups else None
        if packed is not None:
            weights, index = packed
            index_B = [NO_ADAPTER if key is None else index[key] for key in keys_B]
            order_B2 = order_rows(index_B, weights.num_versions)
            return SegmentedLora(weights=weights, order_B2=order_B2, index_B=_index_of_rows(index_B, weights))
        order = sorted(adapters)
        if len(order) == 1 and None not in keys_B:
            return self._single(order[0], adapters[order[0]])
        loras = _cached(
            self._concatenated,
            tuple(order),
            MAX_SETS,
            lambda: concatenate_loras([self._single(key, adapters[key]) for key in order], self._model.targets),
        )
        return loras.select([NO_ADAPTER if key is None else order.index(key) for key in keys_B])

    def clear(self) -> None:
        """Forget what is kept; bindings in use stay valid."""
        self._singles.clear()
        self._concatenated.clear()
        self._packed.clear()
        self._last = ((), None)

    def _single(self, key: Key, adapter: Adapter) -> SingleLora:
        return _cached(self._singles, key, MAX_SINGLE, lambda: self._make_single(adapter))

    def _make_single(self, adapter: Adapter) -> SingleLora:
        single = single_lora(self._model.own_lora(adapter.arrays), lora_scaling(adapter, self._model))
        mx.eval(single.a_IR, single.b_RO, single.dora_scale_O, single.experts.arrays())
        return single


class PackedLoraCache:
    """Packed weights: of one version by themselves, of several in a stack. Device thread only.

    Rows come and end all the time, so the stack serves as long as it holds the versions that they use; it is copied
    when a version comes that it lacks. There is one stack, and no version is kept twice.
    """

    def __init__(self, model: SharedModel) -> None:
        self._model = model
        self._alone: OrderedDict[Key, PackedLora | None] = OrderedDict()  # those used last come last
        self._stack: PackedLora | None = None
        self._index: OrderedDict[Key, int] = OrderedDict()  # in the stack; those used last come last
        self._dropped: set[Key] = set()  # when the stack was copied

    def of(self, adapters: Mapping[Key, Adapter]) -> tuple[PackedLora, Mapping[Key, int]] | None:
        """Weights, and the index of each version in them, perhaps of more versions than were asked for. None where the
        kernels cannot serve these versions, or not together."""
        if len(adapters) == 1:
            [(version, adapter)] = adapters.items()
            weights = self._one(version, adapter)
            return (weights, {version: 0}) if weights else None
        stack = self._stack if self._index.keys() >= adapters.keys() else self._copied(adapters)
        if stack is None:
            return None
        for version in adapters:
            self._index.move_to_end(version)
        return stack, self._index

    def clear(self) -> None:
        self._alone.clear()
        self._stack = None
        self._index.clear()
        self._dropped.clear()

    def _one(self, version: Key, adapter: Adapter) -> PackedLora | None:
        if self._stack is not None and version in self._index:
            self._index.move_to_end(version)
            return self._stack.version(self._index[version])
        return _cached(self._alone, version, MAX_ALONE, lambda: self._pack(adapter))

    def _pack(self, adapter: Adapter) -> PackedLora | None:
        arrays, scaling = self._model.own_lora(adapter.arrays), lora_scaling(adapter, self._model)
        return pack_lora(arrays, scaling, self._model.groups, self._model.dtype)

    def _copied(self, adapters: Mapping[Key, Adapter]) -> PackedLora | None:
        """A new stack with `adapters`; None, and the old one stays, where they are not alike."""
        versions = sorted(adapters)
        parts: list[PackedLora] = []
        for version in versions:
            part = self._one(version, adapters[version])
            if part is None or (parts and part.layout is not parts[0].layout):
                return None
            parts.append(part)
        kept = self._kept(versions, parts[0].layout)
        if self._stack is not None:
            parts += [self._stack.version(self._index[version]) for version in kept]
        self._stack = stack_packed(parts + parts[:1] * (_capacity(len(parts)) - len(parts)))
        held = [*versions, *kept]
        self._dropped = self._index.keys() - set(held)
        self._index = OrderedDict(zip(held, range(len(held)), strict=True))
        for version in versions:
            self._alone.pop(version, None)
        return self._stack

    def _kept(self, versions: Sequence[Key], layout: PackedLayout) -> list[Key]:
        """The versions that stay beside `versions`: as many as there is capacity for, those used last.

        All stay where a version comes back: then rows of two classes take turns, and each class uses other versions.
        """
        if self._stack is None or self._stack.layout is not layout:
            return []
        others = [version for version in self._index if version not in versions]
        free = _capacity(len(versions)) - len(versions)
        return others if self._dropped.intersection(versions) else others[max(0, len(others) - free) :]


def _cached(cache: OrderedDict[CacheKey, Value], key: CacheKey, size: int, make: Callable[[], Value]) -> Value:
    """The value of `key`, made if it is missing; the `size` values that were used last stay."""
    if key not in cache:
        cache[key] = make()
        if len(cache) > size:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return cache[key]


def _flat_lora(weights: PackedLora, index_M: npt.NDArray[np.int32]) -> SegmentedLora:
    rows = _index_of_rows(index_M, weights)
    return SegmentedLora(
        weights=weights, order_B2=order_tokens(index_M, weights.num_versions), index_B=rows, is_flat=True
    )


def _index_of_rows(index_B: Sequence[int] | npt.NDArray[np.int32], weights: PackedLora) -> mx.array | None:
    """The versions of rows as experts read them; None where there are none to choose."""
    if not weights.experts or (weights.num_versions == 1 and NO_ADAPTER not in index_B):
        return None
    return mx.array(index_B, mx.int32)


def _capacity(num_versions: int) -> int:
    """Few numbers, as each is compiled anew."""
    return 1 << (num_versions - 1).bit_length()
