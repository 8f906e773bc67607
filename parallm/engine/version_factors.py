"""Versions' factors for the kernels of `model/row_lora.py`: of one version by themselves, of several in a stack.

Rows come and end all the time, so the stack serves as long as it holds the versions that they use; it is copied when
one comes that it lacks. Only one is kept, and no version twice.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallm.model.adapter import Adapter
from parallm.model.dora import scaling_of
from parallm.model.flat_factors import FlatFactors, Layout, flat_factors, stack_factors
from parallm.model.lora import one_adapter
from parallm.model.shared_model import SharedModel

MOST_ALONE = 16  # of 84 MB each for rank 16 on all linears of an 8B shape

VersionKey = tuple[str, int]
"""An adapter's name and version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Factors for some rows, and where in them each version's are."""

    factors: FlatFactors
    places: Mapping[VersionKey, int]
    """Of each version in `factors`, which may have more than were asked for."""


class VersionFactors:
    """Owner of the stack, and of versions by themselves. Device thread only."""

    def __init__(self, model: SharedModel) -> None:
        self._model = model
        self._alone: OrderedDict[VersionKey, FlatFactors | None] = OrderedDict()  # those used last come last
        self._stack: FlatFactors | None = None
        self._places: OrderedDict[VersionKey, int] = OrderedDict()  # in the stack; those used last come last
        self._dropped: set[VersionKey] = set()  # when the stack was copied

    def of(self, adapters: Mapping[VersionKey, Adapter]) -> Placed | None:
        """None where the kernels cannot serve these versions, or not together."""
        if len(adapters) == 1:
            [(version, adapter)] = adapters.items()
            one = self._one(version, adapter)
            return Placed(factors=one, places={version: 0}) if one else None
        stack = self._stack if self._places.keys() >= adapters.keys() else self._copied(adapters)
        if stack is None:
            return None
        for version in adapters:
            self._places.move_to_end(version)
        return Placed(factors=stack, places=self._places)

    def clear(self) -> None:
        self._alone.clear()
        self._stack = None
        self._places.clear()
        self._dropped.clear()

    def _one(self, version: VersionKey, adapter: Adapter) -> FlatFactors | None:
        if self._stack is not None and version in self._places:
            self._places.move_to_end(version)
            return self._stack.version(self._places[version])
        if version not in self._alone:
            one = one_adapter(adapter.arrays, scaling_of(adapter, self._model))
            self._alone[version] = flat_factors(one, self._model.groups, self._model.dtype)
            if len(self._alone) > MOST_ALONE:
                self._alone.popitem(last=False)
        self._alone.move_to_end(version)
        return self._alone[version]

    def _copied(self, adapters: Mapping[VersionKey, Adapter]) -> FlatFactors | None:
        """A new stack with `adapters`; None, and the old one stays, where they are not alike."""
        versions = sorted(adapters)
        parts: list[FlatFactors] = []
        for version in versions:
            one = self._one(version, adapters[version])
            if one is None or (parts and one.layout is not parts[0].layout):
                return None
            parts.append(one)
        kept = self._kept(versions, parts[0].layout)
        if self._stack is not None:
            parts += [self._stack.version(self._places[version]) for version in kept]
        self._stack = stack_factors(parts + parts[:1] * (_num_places(len(parts)) - len(parts)))
        held = [*versions, *kept]
        self._dropped = self._places.keys() - set(held)
        self._places = OrderedDict(zip(held, range(len(held)), strict=True))
        for version in versions:
            self._alone.pop(version, None)
        return self._stack

    def _kept(self, versions: Sequence[VersionKey], layout: Layout) -> list[VersionKey]:
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
