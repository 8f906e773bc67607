import mlx.core as mx

from parallm.model.kernels.cuda import interned_array


def test_the_same_numbers_are_the_same_array() -> None:
    first = interned_array((0.5, 1.0), mx.float32)
    assert first is interned_array((0.5, 1.0), mx.float32)
    assert first.tolist() == [0.5, 1.0]
    assert first.dtype == mx.float32


def test_numbers_of_another_type_are_others() -> None:
    found = [
        interned_array((1, 0), mx.int32),
        interned_array((1, 0), mx.float32),
        interned_array((True, False), mx.bool_),
    ]
    assert [one.dtype for one in found] == [mx.int32, mx.float32, mx.bool_]


def test_rows_of_numbers() -> None:
    assert interned_array(((0, -1), (2, 3)), mx.int32).tolist() == [[0, -1], [2, 3]]
