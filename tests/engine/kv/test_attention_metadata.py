import mlx.core as mx

from parallm.engine.kv.attention_metadata import StepIndices

STEPS = [
    ([2, 0, 5], [7, 9, 0]),
    ([2, 0, 5], [8, 10, 0]),
    ([2, 0, 5], [9, 11, 0]),
    ([2, 0, 5], [10, 11, 3]),  # another growth
    ([2, 5], [11, 4]),
    ([2, 5], [3, 1]),  # others in the same slots
    ([5, 2], [3, 1]),
    ([], []),
]


def test_steps_get_the_lengths_and_slots_that_were_asked_for() -> None:
    numbers = StepIndices()
    for slots, lengths in STEPS:
        slots_B, lengths_B = numbers.arrays(slots, lengths)
        assert (slots_B.tolist(), lengths_B.tolist()) == (slots, lengths)
        assert slots_B.dtype == lengths_B.dtype == mx.int32


def test_rows_that_stay_bring_no_new_numbers_from_the_host() -> None:
    numbers = StepIndices()
    numbers.arrays([1, 3, 4], [4, 4, 4])
    slots_B, _ = numbers.arrays([1, 3, 4], [5, 5, 5])
    growth_B = numbers._growth_B
    assert numbers.arrays([1, 3, 4], [6, 6, 6])[0] is slots_B
    assert numbers._growth_B is growth_B


def test_numbers_of_few_rows_are_kept_with_others() -> None:
    numbers = StepIndices()
    for length in (4, 5, 6):
        slots_B, lengths_B = numbers.arrays([3], [length])
        assert (slots_B.tolist(), lengths_B.tolist()) == ([3], [length])
        assert [array.nbytes for array in (numbers._slots_B, numbers._lengths_B)] == [12, 12]  # 8 are kept on the host
