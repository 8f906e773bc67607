"""Names of reward parts, which clients choose and which become columns of metrics.jsonl and labels of `/metrics`."""

from collections.abc import Iterable, Mapping

MOST_NAMES = 64
OTHER = "other"


class PartNames:
    """The first names stay; what comes under further ones counts as `other`. `known` stay in any case."""

    def __init__(self, known: Iterable[str]) -> None:
        self._names = set(known)

    def bounded(self, parts: Mapping[str, float]) -> dict[str, float]:
        """The parts under names that have a column, summed where several have the same."""
        found: dict[str, float] = {}
        for name, part in parts.items():
            if len(self._names) < MOST_NAMES:
                self._names.add(name)
            column = name if name in self._names else OTHER
            found[column] = found.get(column, 0.0) + part
        return found
