"""Groups that are not trained on: counted by reason, the first of each kept in the run folder for people to look at."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallm.rollout.atropos.scored_group import GroupRefused, Reason
from parallm.rollout.live.journal import Journal

FILE = "quarantine.jsonl"
MAX_KEPT = 16
"""Groups of each reason: an environment may get every single one wrong."""
OF_THE_RUN: frozenset[Reason] = frozenset({"stale", "no_signal"})
"""Nothing is wrong with such groups."""


class Quarantine:
    """For the asyncio thread; the file is written in another one."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder / FILE)
        self._counts: Counter[Reason] = Counter()

    @property
    def counts(self) -> Mapping[Reason, int]:
        """Groups by reason, since the start."""
        return dict(sorted(self._counts.items()))

    def put(self, refused: GroupRefused, group: Any) -> None:
        self._counts[refused.reason] += 1
        if refused.reason not in OF_THE_RUN and self._counts[refused.reason] <= MAX_KEPT:
            self._journal.append(lambda: {"reason": refused.reason, "detail": refused.detail, "group": group})

    def close(self) -> None:
        """Wait until the file holds everything."""
        self._journal.close()
