"""Which step has drawn which problems, so that steps that a checkpoint interrupts draw the same ones again.

Steps that are collected at the same time draw in turns, so no single cursor tells what a finished step has used.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from parallm.rollout.problem_stream import Stream
from parallm.types import Problem


class Ledger:
    """A stream of problems with its account. Draws are places in the stream: a place always means the same problem."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._cursor = stream.cursor  # the first place that was never drawn
        self._again: deque[int] = deque()  # places that were drawn in vain and come first
        self._unclaimed: list[int] = []
        self._drawn: dict[int, list[int]] = {}

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems. `claim` them for a step before anything else draws."""
        return [self._next() for _ in range(count)]

    @property
    def newest_place(self) -> int:
        """Of what was drawn last and not claimed yet."""
        return self._unclaimed[-1]

    def claim(self, step: int) -> None:
        """Book what was drawn since the last claim on `step`."""
        self._drawn.setdefault(step, []).extend(self._unclaimed)
        self._unclaimed = []

    def settle(self, step: int) -> None:
        """Forget what `step` has drawn: it was trained on, or taught nothing."""
        self._drawn.pop(step, None)

    def give_back(self, steps: Iterable[int]) -> None:
        """Let what these steps have drawn be the next to draw, in the order of the steps."""
        places = [place for step in sorted(steps) for place in self._drawn.pop(step, [])]
        self._again.extendleft(reversed(places))

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON: steps that are not settled begin anew after `restore`."""
        open_steps = [place for step in sorted(self._drawn) for place in self._drawn[step]]
        return {"cursor": self._cursor, "again": [*open_steps, *self._unclaimed, *self._again]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as `state` says; one without `again` has no open steps."""
        self._cursor = int(state["cursor"])
        self._again = deque(state.get("again", ()))
        self._unclaimed, self._drawn = [], {}

    def _next(self) -> Problem:
        if self._again:
            place = self._again.popleft()
        else:
            place = self._cursor
            self._cursor += 1
        self._unclaimed.append(place)
        self._stream.cursor = place
        return self._stream.take(1)[0]
