"""Keys of PEFT's rank_pattern and alpha_pattern, compared with the names of layers.

PEFT takes a key as a regular expression: the first one that matches the end of a path, from a dot on, counts. Adapters
come from strangers, and an expression can take a time that is exponential in its length. So none is run here: a key is
names with dots between them, `.*` for anything, `^` for the beginning of the path, and `|` between alternatives. A dot
is a dot.
"""

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from parallm.errors import AdapterError

LETTERS = frozenset(string.ascii_letters + string.digits + "_-.")
ANYTHING = ".*"
DOT = "\0"
"""Stands for an escaped dot while a key is cut."""
MAX_ANYTHING = 256
"""Of one pattern: keys with `.*` are compared with every name, while others are looked up."""

Value = TypeVar("Value", int, float)


@dataclass(frozen=True, slots=True)
class _Alternative:
    pieces: tuple[str, ...]
    """What stands before, between and after each `.*`."""
    is_whole: bool
    """Whether the first piece begins the path."""

    def matches(self, name: str) -> bool:
        begin, last = self._end_of_first(name), self.pieces[-1]
        for piece in self.pieces[1:-1]:
            found = name.find(piece, begin) if begin >= 0 else -1
            begin = found + len(piece) if found >= 0 else -1
        return begin >= 0 and name.endswith(last) and len(name) - len(last) >= begin

    def _end_of_first(self, name: str) -> int:
        """Where the first piece ends, as early as possible; -1: it is not there."""
        first = self.pieces[0]
        if name.startswith(first):
            return len(first)
        found = -1 if self.is_whole else name.find(f".{first}")
        return found + 1 + len(first) if found >= 0 else -1


def check_keys(pattern: Iterable[str]) -> None:
    """Raise AdapterError for a key that is more than names, dots, `.*`, `^` and `|`."""
    number = sum(len(alternative.pieces) - 1 for key in pattern for alternative in _alternatives(key))
    if number > MAX_ANYTHING:
        raise AdapterError(f"the keys of a pattern have {ANYTHING} {number} times, the limit is {MAX_ANYTHING}")


def values_by_name(pattern: Mapping[str, Value], names: Iterable[str]) -> dict[str, Value]:
    """The value of each of `names` that a key fits, as PEFT chooses it. Raises AdapterError for other expressions."""
    check_keys(pattern)
    places: dict[tuple[str, bool], int] = {}  # of keys that name an end, or the whole path, exactly
    gapped: list[tuple[int, _Alternative]] = []
    for place, key in enumerate(pattern):
        for alternative in _alternatives(key):
            if len(alternative.pieces) > 1:
                gapped.append((place, alternative))
            else:
                places.setdefault((alternative.pieces[0], alternative.is_whole), place)
    values = list(pattern.values())
    fitting = {name: _fitting(name, places, gapped) for name in names}
    return {name: values[min(some)] for name, some in fitting.items() if some}


def _fitting(name: str, places: Mapping[tuple[str, bool], int], gapped: list[tuple[int, _Alternative]]) -> list[int]:
    exact = [(name, True), *((end, False) for end in _ends(name))]
    found = [places[key] for key in exact if key in places]
    return found + [place for place, alternative in gapped if alternative.matches(name)]


def _alternatives(key: str) -> list[_Alternative]:
    found = []
    for part in key.split("|"):
        text = part.removeprefix("^").removesuffix("$")
        # an escaped dot before a star is no dot of `.*`
        pieces = tuple(piece.replace(DOT, ".") for piece in text.replace("\\.", DOT).split(ANYTHING))
        if not text or DOT in text or not all(LETTERS.issuperset(piece) for piece in pieces):
            raise AdapterError(
                f"the key {key[:100]!r} of a pattern is an expression that is not read here; name layers by the ends "
                f"of their paths, such as q_proj or layers.0.mlp.up_proj, with {ANYTHING} for anything and | between "
                "alternatives"
            )
        found.append(_Alternative(pieces, part.startswith("^")))
    return found


def _ends(name: str) -> list[str]:
    """`name`, and what follows each of its dots."""
    parts = name.split(".")
    return [".".join(parts[place:]) for place in range(len(parts))]
