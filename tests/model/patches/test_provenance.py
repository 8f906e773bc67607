import gc

import mlx.core as mx

from parallm.model.patches import provenance
from parallm.model.patches.provenance import origin_of, set_origin


def test_an_array_is_known_by_itself_and_not_by_what_it_holds() -> None:
    array, alike = mx.zeros(3), mx.zeros(3)
    set_origin(array, "first")
    assert origin_of(array) == "first"
    assert origin_of(alike) is None


def test_nothing_is_kept_longer_than_the_array() -> None:
    before = len(provenance._origins)
    array = mx.zeros(3)
    set_origin(array, "gone")
    assert len(provenance._origins) == before + 1
    del array
    gc.collect()
    assert len(provenance._origins) == before
