import gc

import mlx.core as mx

from parallm.model import origins
from parallm.model.origins import origin_of, remember


def test_an_array_is_known_by_itself_and_not_by_what_it_holds() -> None:
    array, alike = mx.zeros(3), mx.zeros(3)
    remember(array, "first")
    assert origin_of(array) == "first"
    assert origin_of(alike) is None


def test_nothing_is_kept_longer_than_the_array() -> None:
    before = len(origins._origins)
    array = mx.zeros(3)
    remember(array, "gone")
    assert len(origins._origins) == before + 1
    del array
    gc.collect()
    assert len(origins._origins) == before
