"""How often Python looks for unused objects that refer to each other. All threads wait while it does."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTION_OBJECTS = 20_000
"""New objects until Python looks for unused ones among them, in place of 700 or 2,000."""


def collect_rarely() -> None:
    """Raise the number of new objects that a collection waits for. Collections that are turned off stay off."""
    first, *others = gc.get_threshold()
    if first:
        gc.set_threshold(COLLECTION_OBJECTS, *others)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude all present objects from collections, and collect new ones rarely. A full collection would take 0.1 s."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    collect_rarely()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
