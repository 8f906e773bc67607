"""Which LoRA view a set of rows needs: none for the base, one adapter, a few side by side, or stacks of many.

With MLX's CUDA build one view serves rows of any versions, see `row_lora`; the others do what it cannot.
"""

import operator
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import mlx.core as mx

from parallm.engine.version_factors import VersionFactors, VersionKey
from parallm.model.adapter import Adapter
from parallm.model.dora import scaling_of
from parallm.model.lora import OneAdapter, View, one_adapter
from parallm.model.mixed_adapters import MixedAdapters, stack_adapters
from parallm.model.row_lora import NO_ADAPTER, RowAdapters, order_rows
from parallm.model.shared_model import SharedModel
from parallm.model.side_by_side import MOST_ADAPTERS, SideBySide, side_by_side

MOST_KEPT = 16
MOST_SETS = 2  # each is a copy of all its adapters, and rows change sets one way

Kept = TypeVar("Kept")
Made = TypeVar("Made")


class AdapterViews:
    """Views by version, kept while they are used: making one costs a multiplication per site, a stack costs a copy."""

    def __init__(self, model: SharedModel) -> None:
        self._model = model
        self._ones: OrderedDict[VersionKey, OneAdapter] = OrderedDict()
        self._few: OrderedDict[tuple[VersionKey, ...], SideBySide] = OrderedDict()
        self._stacks: OrderedDict[tuple[VersionKey | None, ...], MixedAdapters] = OrderedDict()
        self._last: tuple[Sequence[Adapter | None], View | None] = ((), None)  # rows seldom change
        self._factors = VersionFactors(model)

    def for_rows(self, adapters_B: Sequence[Adapter | None]) -> View | None:
        """The view for rows that use `adapters_B` (None: the base)."""
        known_B, view = self._last
        if len(known_B) != len(adapters_B) or not all(map(operator.is_, known_B, adapters_B)):
            view = self._for_rows(adapters_B)
            self._last = (tuple(adapters_B), view)
        return view

    def _for_rows(self, adapters_B: Sequence[Adapter | None]) -> View | None:
        distinct = {_key(adapter): adapter for adapter in adapters_B}
        if all(adapter is None for adapter in distinct.values()):
            return None
        present = {key: adapter for key, adapter in distinct.items() if key is not None and adapter is not None}
        if self._model.groups and (rows := self._rows([_key(adapter) for adapter in adapters_B], present)):
            return rows
        if len(distinct) == 1:
            return self._one(next(iter(present.values())))
        if len(present) <= MOST_ADAPTERS:
            places = {key: place for place, key in enumerate(sorted(present))}
            few = self._side_by_side(tuple(sorted(present)), [present[key] for key in sorted(present)])
            keys = [_key(adapter) for adapter in adapters_B]
            return few.for_rows([-1 if key is None else places[key] for key in keys])
        order = sorted(distinct, key=lambda key: (key is not None, key))
        stack = self._stack(tuple(order), [distinct[key] for key in order])
        index = {key: place for place, key in enumerate(order)}
        return replace(stack, index_B=mx.array([index[_key(adapter)] for adapter in adapters_B], mx.uint32))

    def _rows(self, keys_B: Sequence[VersionKey | None], present: Mapping[VersionKey, Adapter]) -> RowAdapters | None:
        """The view of the kernels, or None where they cannot serve these versions together."""
        found = self._factors.of(present)
        if found is None:
            return None
        index_B = [NO_ADAPTER if key is None else found.places[key] for key in keys_B]
        return RowAdapters(factors=found.factors, order_B2=order_rows(index_B, found.factors.num_versions))

    def clear(self) -> None:
        """Forget what is kept; views that are in use go on."""
        self._ones.clear()
        self._few.clear()
        self._stacks.clear()
        self._factors.clear()
        self._last = ((), None)

    def _one(self, adapter: Adapter) -> OneAdapter:
        key = (adapter.name, adapter.version)
        if key not in self._ones:
            view = one_adapter(adapter.arrays, scaling_of(adapter, self._model))
            mx.eval(view.a_IR, view.b_RO, view.stretch_O)
            self._ones[key] = view
            _shrink(self._ones, MOST_KEPT)
        self._ones.move_to_end(key)
        return self._ones[key]

    def _side_by_side(self, keys: tuple[VersionKey, ...], adapters: Sequence[Adapter]) -> SideBySide:
        if keys not in self._few:
            self._few[keys] = side_by_side([self._one(adapter) for adapter in adapters], self._model.sites)
            _shrink(self._few, MOST_SETS)
        self._few.move_to_end(keys)
        return self._few[keys]

    def _stack(self, keys: tuple[VersionKey | None, ...], adapters: Sequence[Adapter | None]) -> MixedAdapters:
        if keys not in self._stacks:
            stack = stack_adapters(
                [None if adapter is None else self._one(adapter) for adapter in adapters], self._model.sites
            )
            mx.eval(stack.a_SIR, stack.b_SRO, stack.stretch_SO)
            self._stacks[keys] = stack
            _shrink(self._stacks, MOST_SETS)
        self._stacks.move_to_end(keys)
        return self._stacks[keys]


def _key(adapter: Adapter | None) -> VersionKey | None:
    return None if adapter is None else (adapter.name, adapter.version)


def _shrink(views: OrderedDict[Kept, Made], most: int) -> None:
    while len(views) > most:
        views.popitem(last=False)
