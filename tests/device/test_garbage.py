"""Collections are rare while the heap is frozen, and as before afterwards."""

import gc
from collections.abc import Iterator

import pytest

from parallm.device.garbage import COLLECTION_OBJECTS, frozen_heap


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.freeze()  # as the tests are


def test_collections_are_rare_while_the_heap_is_frozen() -> None:
    gc.set_threshold(700, 10, 10)
    with frozen_heap():
        assert gc.get_threshold()[0] == COLLECTION_OBJECTS
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold()[0] == 700


def test_who_has_turned_collections_off_keeps_them_off() -> None:
    gc.set_threshold(0)
    with frozen_heap():
        assert gc.get_threshold()[0] == 0
