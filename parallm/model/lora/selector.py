"""Versions' factors for the kernels of `model/lora/segmented.py`: of one version by themselves, of several in a stack.

Rows come and end all the time, so the stack serves as long as it holds the versions that they use; it is copied when
one comes that it lacks. Only one is kept, and no version twice.
"""

import operator
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import mlx.core as mx

from parallm.model.adapters.adapter import Adapter
from parallm.model.lora.concatenated import MAX_CONCATENATED, ConcatenatedLoras, concatenate_loras
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.gathered import GatheredLora, stack_loras
from parallm.model.lora.packed import PackedLayout, PackedLora, pack_lora, stack_packed
from parallm.model.lora.segmented import NO_ADAPTER, SegmentedLora, order_rows
from parallm.model.lora.single import LoraBinding, SingleLora, single_lora
from parallm.model.shared_model import SharedModel

MAX_ALONE = 16  # of 84 MB each for rank 16 on all linears of an 8B shape

VersionKey = tuple[str, int]
"""An adapter's name and version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedVersions:
    """Factors for some rows, and where in them each version's are."""

    weights: PackedLora
    places: Mapping[VersionKey, int]
    """Of each version in `weights`, which may have more than were asked for."""


class PackedLoraCache:
    """Owner of the stack, and of versions by themselves. Device thread only."""

    def __init__(self, model: SharedModel) -> None:
        self._model = model
        self._alone: OrderedDict[VersionKey, PackedLora | None] = OrderedDict()  # those used last come last
        self._stack: PackedLora | None = None
        self._places: OrderedDict[VersionKey, int] = OrderedDict()  # in the stack; those used last come last
        self._dropped: set[VersionKey] = set()  # when the stack was copied

    def of(self, adapters: Mapping[VersionKey, Adapter]) -> PackedVersions | None:
        """None where the kernels cannot serve these versions, or not together."""
        if len(adapters) == 1:
            [(version, adapter)] = adapters.items()
            one = self._one(version, adapter)
            return PackedVersions(weights=one, places={version: 0}) if one else None
        stack = self._stack if self._places.keys() >= adapters.keys() else self._copied(adapters)
        if stack is None:
            return None
        for version in adapters:
            self._places.move_to_end(version)
        return PackedVersions(weights=stack, places=self._places)

    def clear(self) -> None:
        self._alone.clear()
        self._stack = None
        self._places.clear()
        self._dropped.clear()

    def _one(self, version: VersionKey, adapter: Adapter) -> PackedLora | None:
        if self._stack is not None and version in self._places:
            self._places.move_to_end(version)
            return self._stack.version(self._places[version])
        if version not in self._alone:
            one = single_lora(adapter.arrays, lora_scaling(adapter, self._model))
            self._alone[version] = pack_lora(one, self._model.groups, self._model.dtype)
            if len(self._alone) > MAX_ALONE:
                self._alone.popitem(last=False)
        self._alone.move_to_end(version)
        return self._alone[version]

    def _copied(self, adapters: Mapping[VersionKey, Adapter]) -> PackedLora | None:
        """A new stack with `adapters`; None, and the old one stays, where they are not alike."""
        versions = sorted(adapters)
        parts: list[PackedLora] = []
        for version in versions:
            one = self._one(version, adapters[version])
            if one is None or (parts and one.layout is not parts[0].layout):
                return None
            parts.append(one)
        kept = self._kept(versions, parts[0].layout)
        if self._stack is not None:
            parts += [self._stack.version(self._places[version]) for version in kept]
        self._stack = stack_packed(parts + parts[:1] * (_num_places(len(parts)) - len(parts)))
        held = [*versions, *kept]
        self._dropped = self._places.keys() - set(held)
        self._places = OrderedDict(zip(held, range(len(held)), strict=True))
        for version in versions:
            self._alone.pop(version, None)
        return self._stack

    def _kept(self, versions: Sequence[VersionKey], layout: PackedLayout) -> list[VersionKey]:
        """What stays beside `versions`, as far as there is room: what was used last.

        All stays where a version comes back: then rows of two classes take turns, of which each uses others.
        """
        if self._stack is None or self._stack.layout is not layout:
            return []
        others = [version for version in self._places if version not in versions]
        room = _num_places(len(versions)) - len(versions)
        return others if self._dropped.intersection(versions) else others[max(0, len(others) - room) :]


def _num_places(num_versions: int) -> int:
    """Few numbers, as each is compiled anew."""
    return 1 << (num_versions - 1).bit_length()


MAX_SINGLE = 16
MAX_SETS = 2  # each is a copy of all its adapters, and rows change sets one way

Kept = TypeVar("Kept")
Made = TypeVar("Made")


class LoraSelector:
    """Views by version, kept while they are used: making one costs a multiplication per site, a stack costs a copy."""

    def __init__(self, model: SharedModel) -> None:
        self._model = model
        self._ones: OrderedDict[VersionKey, SingleLora] = OrderedDict()
        self._few: OrderedDict[tuple[VersionKey, ...], ConcatenatedLoras] = OrderedDict()
        self._stacks: OrderedDict[tuple[VersionKey | None, ...], GatheredLora] = OrderedDict()
        self._last: tuple[Sequence[Adapter | None], LoraBinding | None] = ((), None)  # rows seldom change
        self._packed = PackedLoraCache(model)

    def select(self, adapters_B: Sequence[Adapter | None]) -> LoraBinding | None:
        """The view for rows that use `adapters_B` (None: the base)."""
        known_B, lora = self._last
        if len(known_B) != len(adapters_B) or not all(map(operator.is_, known_B, adapters_B)):
            lora = self._select(adapters_B)
            self._last = (tuple(adapters_B), lora)
        return lora

    def _select(self, adapters_B: Sequence[Adapter | None]) -> LoraBinding | None:
        distinct = {_key(adapter): adapter for adapter in adapters_B}
        if all(adapter is None for adapter in distinct.values()):
            return None
        present = {key: adapter for key, adapter in distinct.items() if key is not None and adapter is not None}
        if self._model.groups and (rows := self._rows([_key(adapter) for adapter in adapters_B], present)):
            return rows
        if len(distinct) == 1:
            return self._one(next(iter(present.values())))
        if len(present) <= MAX_CONCATENATED:
            places = {key: place for place, key in enumerate(sorted(present))}
            few = self._concatenated(tuple(sorted(present)), [present[key] for key in sorted(present)])
            keys = [_key(adapter) for adapter in adapters_B]
            return few.select([-1 if key is None else places[key] for key in keys])
        order = sorted(distinct, key=lambda key: (key is not None, key))
        stack = self._stack(tuple(order), [distinct[key] for key in order])
        index = {key: place for place, key in enumerate(order)}
        return replace(stack, index_B=mx.array([index[_key(adapter)] for adapter in adapters_B], mx.uint32))

    def _rows(self, keys_B: Sequence[VersionKey | None], present: Mapping[VersionKey, Adapter]) -> SegmentedLora | None:
        """The view of the kernels, or None where they cannot serve these versions together."""
        found = self._packed.of(present)
        if found is None:
            return None
        index_B = [NO_ADAPTER if key is None else found.places[key] for key in keys_B]
        return SegmentedLora(weights=found.weights, order_B2=order_rows(index_B, found.weights.num_versions))

    def clear(self) -> None:
        """Forget what is kept; views that are in use go on."""
        self._ones.clear()
        self._few.clear()
        self._stacks.clear()
        self._packed.clear()
        self._last = ((), None)

    def _one(self, adapter: Adapter) -> SingleLora:
        key = (adapter.name, adapter.version)
        if key not in self._ones:
            lora = single_lora(adapter.arrays, lora_scaling(adapter, self._model))
            mx.eval(lora.a_IR, lora.b_RO, lora.dora_scale_O)
            self._ones[key] = lora
            _shrink(self._ones, MAX_SINGLE)
        self._ones.move_to_end(key)
        return self._ones[key]

    def _concatenated(self, keys: tuple[VersionKey, ...], adapters: Sequence[Adapter]) -> ConcatenatedLoras:
        if keys not in self._few:
            self._few[keys] = concatenate_loras([self._one(adapter) for adapter in adapters], self._model.targets)
            _shrink(self._few, MAX_SETS)
        self._few.move_to_end(keys)
        return self._few[keys]

    def _stack(self, keys: tuple[VersionKey | None, ...], adapters: Sequence[Adapter | None]) -> GatheredLora:
        if keys not in self._stacks:
            stack = stack_loras(
                [None if adapter is None else self._one(adapter) for adapter in adapters], self._model.targets
            )
            mx.eval(stack.a_SIR, stack.b_SRO, stack.dora_scale_SO)
            self._stacks[keys] = stack
            _shrink(self._stacks, MAX_SETS)
        self._stacks.move_to_end(keys)
        return self._stacks[keys]


def _key(adapter: Adapter | None) -> VersionKey | None:
    return None if adapter is None else (adapter.name, adapter.version)


def _shrink(views: OrderedDict[Kept, Made], most: int) -> None:
    while len(views) > most:
        views.popitem(last=False)
