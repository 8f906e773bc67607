"""The log of a run's acts and events, each with its time and step: `happenings.jsonl`, and the newest in memory.

Clients' acts come from the server, refused ones included. Rows of steps that an interrupted run takes again stay: the
acts were done.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallm.metrics.json_lines import JsonLines, read_rows

MAX_ROWS = 2000
"""Rows in memory; the file has all."""

Row = Mapping[str, Any]


class Happenings:
    """Those of one policy. Used on the asyncio thread; a disk that refuses rows keeps nothing from going on."""

    def __init__(self, folder: Path, policy: str, step: Callable[[], int], *, writes: bool = True) -> None:
        """Read the rows that the run has in `folder`. `step` returns the number of finished steps.

        Workers but the first keep new rows in memory alone (`writes`).
        """
        file = folder / "happenings.jsonl"
        self.tell: Callable[[Row], None] = lambda _: None
        """Gets each new row."""
        self._policy = policy
        self._step = step
        self._rows = deque(read_rows(file), MAX_ROWS)
        self._lines = JsonLines(file) if writes else None

    def add(
        self,
        kind: str,
        *,
        what: str = "",
        by: str = "",
        text: str = "",
        step: int | None = None,
        values: Row | None = None,
        refused: str | None = None,
    ) -> None:
        """Note what has happened now.

        `what` is what it happened to, `by` the name of the key, empty for the run itself. `text` is a sentence for
        people. `refused` is why an act was not done.
        """
        row = {
            "time": time.time(),
            "step": self._step() if step is None else step,
            "kind": kind,
            "what": what,
            "by": by,
            "text": text or f"{kind} {what}".strip(),
            "policy": self._policy,
            "values": dict(values or {}),
            "refused": refused,
        }
        self._rows.append(row)
        if self._lines is not None:
            self._lines.append(row)
        self.tell(row)

    def rows(self, limit: int = MAX_ROWS) -> Sequence[Row]:
        """Return the newest rows, oldest first."""
        return tuple(self._rows)[-limit:] if limit > 0 else ()
