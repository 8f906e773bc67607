"""How much memory the large bodies of all requests may take together, from their first byte until they are read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parallm.errors import EngineFull

SMALL = 65_536
"""Bytes of a body that count for nothing: usual requests are never refused for those of others."""
BODIES = 64
"""Of the largest kind at once."""


class BodyBudget:
    """Used on the event loop."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_bytes = BODIES * max_body_bytes
        self.num_bytes = 0

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        """Around one body, which tells how many bytes of it are there. That raises EngineFull beyond the limit."""
        taken = 0

        def grow(num_bytes: int) -> None:
            nonlocal taken
            more = num_bytes - taken
            if num_bytes <= SMALL:
                return
            if self.num_bytes + more > self._max_bytes:
                raise EngineFull(
                    f"request bodies of {self.num_bytes} bytes are being read, the limit is {self._max_bytes}; "
                    "send this one again later"
                )
            self.num_bytes += more
            taken = num_bytes

        try:
            yield grow
        finally:
            self.num_bytes -= taken
