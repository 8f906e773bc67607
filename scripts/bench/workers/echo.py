"""An exchange whose other ranks are echoes of this one: they answer at once with what it has made itself.

So a step takes rank 0 what it takes without waiting, and without the bytes on their way.
"""

import queue
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

import mlx.core as mx

from parallm.distributed.exchange import Alone, Vectors, done
from parallm.distributed.wire import pack, pack_figures, pack_rows, unpack, unpack_figures
from parallm.metrics.rollout_format import EncodedRows


class Echo(Alone):
    """For groups of one size, whose problems share one id."""

    def __init__(self, size: int, late_seconds: float) -> None:
        """`late_seconds`: by how much the others come late with their groups, as a control."""
        self.size = size
        self._posts: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._late_seconds = late_seconds

    def gather(self, label: str, part: bytes) -> Future[list[bytes]]:
        if not label.startswith("figures"):
            return done([part] * self.size)
        ((_, figures),) = unpack_figures(part).items()
        return done([pack_figures({rank: figures}) for rank in range(self.size)])

    def all_gather(self, label: str, part: bytes) -> Future[list[bytes]]:
        time.sleep(self._late_seconds)
        return self.gather(label, part)

    def echo_rows(self, step: int, rows: EncodedRows) -> None:
        """Post the completions that the other ranks would have encoded, with the texts and numbers of rank 0's."""
        group_size = 1 + max(index for _, index in rows)
        others = [index for row in range(len(rows) * self.size) if (index := divmod(row, group_size)) not in rows]
        head, blocks = unpack(pack_rows(step, rows))
        for rank in range(1, self.size):
            theirs = others[(rank - 1) * len(rows) : rank * len(rows)]
            if len(theirs) == len(rows):  # not packed anew, as this takes time of rank 0
                self._posts.put((rank, pack(head | {"indices": theirs}, blocks)))
            else:
                self._posts.put((rank, pack_rows(step, dict(zip(theirs, rows.values(), strict=False)))))

    def take_post(self, seconds: float) -> tuple[int, bytes] | None:
        with suppress(queue.Empty):
            return self._posts.get(timeout=seconds) if seconds > 0 else self._posts.get_nowait()
        return None

    def sum_slots(self, vectors_N: Vectors, used: Sequence[int], slots: int, length: int) -> Future[mx.array]:
        total_N = vectors_N[0] * len(used)
        mx.eval(total_N)
        return done(total_N)
