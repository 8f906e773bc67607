"""An exchange whose other ranks are echoes of this one: they answer at once with what it has made itself.

So a step takes rank 0 what it takes without waiting, and without the bytes on their way.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future

import mlx.core as mx

from parallm.distributed.exchange import Alone, Vectors, done
from parallm.distributed.wire import pack, pack_figures, unpack, unpack_figures


class Echo(Alone):
    """For groups of one size, whose problems share one id."""

    def __init__(self, size: int, late_seconds: float) -> None:
        """`late_seconds`: by how much the others come late with their groups, as a control."""
        super().__init__()
        self.size = size
        self._late_seconds = late_seconds

    def gather(self, label: str, part: bytes) -> Future[list[bytes]]:
        if not label.startswith("figures"):
            return done([part] * self.size)
        ((_, figures),) = unpack_figures(part).items()
        return done([pack_figures({rank: figures}) for rank in range(self.size)])

    def all_gather(self, label: str, part: bytes) -> Future[list[bytes]]:
        time.sleep(self._late_seconds)
        return self.gather(label, part)

    def post(self, content: bytes) -> None:
        super().post(content)
        head, blocks = unpack(content)
        own, group_size = set(map(tuple, head["places"])), 1 + max(index for _, index in head["places"])
        others = [place for row in range(len(own) * self.size) if (place := divmod(row, group_size)) not in own]
        for start in range(0, len(others) - len(own) + 1, len(own)):
            super().post(pack(head | {"places": others[start : start + len(own)]}, blocks))

    def sum_slots(self, vectors_N: Vectors, used: Sequence[int], slots: int, length: int) -> Future[mx.array]:
        total_N = vectors_N[0] * len(used)
        mx.eval(total_N)
        return done(total_N)
