"""The kernel of a decode step against a plain write and MLX's operations; skipped without MLX's CUDA build."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE

from parallm.model.kernels.columns import Columns, columns_of
from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.decode_attention import (
    RotaryAngles,
    append_and_attend,
    fits,
    lanes_of,
    num_parts,
    queries_at_once,
)
from parallm.model.patches.rotary import Rotary, before_rotation, rotation_of

needs_cuda = pytest.mark.skipif(not on_cuda(), reason="needs MLX's CUDA build")
ROPES = {
    "halves": nn.RoPE(128, base=500000.0),
    "neighbours": nn.RoPE(128, traditional=True, base=10000.0, scale=0.25),
    "first half": nn.RoPE(64, base=10000.0),
    "wavelengths": Llama3RoPE(128, base=500000.0, scaling_config={"factor": 8.0}),
}
Arrays = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]


def step(dtype: mx.Dtype, rows: int, heads: tuple[int, int], size: int, positions: int, seed: int = 0) -> Arrays:
    """Queries, new keys and values, and pools with three slots more than rows."""
    queries, pairs = heads
    shapes = [(rows, queries, 1, size), *[(rows, pairs, 1, size)] * 2, *[(rows + 3, pairs, positions, size)] * 2]
    keys = mx.random.split(mx.random.key(seed), 5)
    arrays = [mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, keys, strict=True)]
    mx.eval(arrays)
    return arrays[0], arrays[1], arrays[2], arrays[3], arrays[4]


def plain(
    arrays: Arrays, slots: list[int], lengths: list[int], window: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is attended, and the pools after the write."""
    queries, new_keys, new_values, keys, values = (np.array(array.astype(mx.float32)) for array in arrays)
    repeats = queries.shape[1] // keys.shape[1]
    keys[slots, :, lengths], values[slots, :, lengths] = new_keys[:, :, 0], new_values[:, :, 0]
    found = np.zeros_like(queries)
    for row, length in enumerate(lengths):
        seen = slice(max(0, length + 1 - window) if window else 0, length + 1)
        for head in range(queries.shape[1]):
            pair = slots[row], head // repeats, seen
            scores = keys[pair] @ queries[row, head, 0] * 0.11
            weights = np.exp(scores - scores.max())
            found[row, head, 0] = weights @ values[pair] / weights.sum()
    return found, keys, values


def places(slots: list[int], lengths: list[int]) -> tuple[mx.array, mx.array]:
    return mx.array(slots, mx.int32), mx.array(lengths, mx.int32)


@needs_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 2e-5), (mx.float16, 2e-3), (mx.bfloat16, 1.5e-2)])
@pytest.mark.parametrize(
    ("heads", "size"),
    [
        ((14, 2), 64),
        ((32, 8), 128),
        ((8, 8), 64),
        ((12, 2), 96),
        ((8, 1), 256),
        ((6, 2), 160),
        ((4, 2), 224),
        ((24, 2), 128),
    ],
)
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("rows", "positions"), [(1, 256), (5, 768), (130, 256)])
def test_the_kernel_agrees_with_the_operations(
    dtype: mx.Dtype, tolerance: float, heads: tuple[int, int], size: int, window: int, rows: int, positions: int
) -> None:
    arrays = step(dtype, rows, heads, size, positions)
    lengths = np.random.default_rng(rows).integers(0, positions, rows).tolist()
    lengths[0] = positions - 1
    if rows > 2:
        lengths[1], lengths[2] = 0, 64
    slots = np.random.default_rng(rows).permutation(rows + 3)[:rows].tolist()
    expected = plain(arrays, slots, lengths, window)
    assert fits(arrays[0], *arrays[3:])
    found = append_and_attend(*arrays, *places(slots, lengths), scale=0.11, window=window)
    assert found.dtype == dtype
    assert found.shape == arrays[0].shape
    assert np.abs(np.array(found.astype(mx.float32)) - expected[0]).max() <= tolerance
    for pool, wanted in zip(arrays[3:], expected[1:], strict=True):
        assert np.array_equal(np.array(pool.astype(mx.float32)), wanted), "one position of each row, and no other"


@needs_cuda
def test_steps_that_follow_each_other_see_what_was_written() -> None:
    queries, *_, keys, values = step(mx.float32, 4, (8, 2), 64, 256)
    pools = mx.array(np.array(keys)), mx.array(np.array(values))
    wanted = queries
    for place in range(5):
        lengths = [length + place for length in (0, 3, 100, 250)]
        _, new_keys, new_values, _, _ = step(mx.float32, 4, (8, 2), 64, 256, seed=place + 1)
        slots = [3, 0, 6, 1]
        queries = append_and_attend(queries, new_keys, new_values, *pools, *places(slots, lengths), scale=0.11)
        wanted, keys, values = map(mx.array, plain((wanted, new_keys, new_values, keys, values), slots, lengths, 0))
    assert mx.abs(queries - wanted).max().item() <= 1e-4


@needs_cuda
def test_queries_over_half_of_a_product_are_copied_right() -> None:
    arrays = step(mx.bfloat16, 6, (8, 2), 64, 256)
    wide = mx.concatenate([arrays[0], arrays[0] * 2], axis=1)
    where = places([0, 1, 2, 3, 4, 5], [5, 80, 0, 33, 200, 255])
    found = append_and_attend(wide[:, :8], *arrays[1:], *where, scale=0.11)
    assert mx.array_equal(found, append_and_attend(*arrays, *where, scale=0.11)).item()


@needs_cuda
@pytest.mark.parametrize("rows", [1, 6])
def test_queries_keys_and_values_may_be_parts_of_one_product(rows: int) -> None:
    arrays = step(mx.bfloat16, rows, (8, 2), 64, 256)
    where = places(list(range(rows)), [5, 80, 0, 33, 200, 255][:rows])
    expected = append_and_attend(*arrays, *where, scale=0.11)
    beside = mx.concatenate([array.reshape(rows, 1, -1) for array in arrays[:3]], axis=-1)
    parts = [part.reshape(rows, 1, -1, 64).transpose(0, 2, 1, 3) for part in mx.split(beside, [512, 640], axis=-1)]
    apart = [mx.repeat(part, 2, axis=-1)[..., ::2] for part in parts]
    columns = [part.reshape(rows, 1, -1, 64).transpose(0, 2, 1, 3) for part in columns_of(beside, [512, 128, 128])]
    assert all(isinstance(part, Columns) for part in columns)
    for queries, keys, values in (parts, apart, columns):
        found = append_and_attend(queries, keys, values, *arrays[3:], *where, scale=0.11)
        assert mx.array_equal(found, expected).item()


@needs_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 2e-5), (mx.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("rope", [*ROPES])
@pytest.mark.parametrize("rows", [1, 70])
def test_the_kernel_rotates_as_the_model_does(dtype: mx.Dtype, tolerance: float, rope: str, rows: int) -> None:
    arrays = step(dtype, rows, (8, 2), 128, 256)
    slots = list(range(rows))
    lengths = np.random.default_rng(1).integers(0, 256, rows).tolist()
    where = places(slots, lengths)
    rotary = Rotary(ROPES[rope], rotation_of(ROPES[rope]))
    rotated = rotary(arrays[0], offset=where[1]), rotary(arrays[1], offset=where[1])
    queries, keys, rotation = before_rotation(*rotated, where[1], dtype)
    assert queries is arrays[0]
    assert keys is arrays[1]
    assert rotation is not None
    expected = plain((*rotated, *arrays[2:]), slots, lengths, 0)
    angles = RotaryAngles(angles=rotation.angles(where[1]), traditional=rotation.traditional)
    found = append_and_attend(queries, keys, *arrays[2:], *where, scale=0.11, rotary=angles)
    assert np.abs(np.array(found.astype(mx.float32)) - expected[0]).max() <= tolerance
    # a rounding in float32 may fall to the other side of a bfloat16
    relative = 1e-6 if dtype == mx.float32 else 8e-3
    assert np.allclose(np.array(arrays[3].astype(mx.float32)), expected[1], rtol=relative, atol=2e-6)
    assert np.array_equal(np.array(arrays[4].astype(mx.float32)), expected[2])


def test_the_kernel_is_not_used_on_a_cpu() -> None:
    arrays = step(mx.float32, 2, (4, 2), 64, 32)
    assert fits(arrays[0], *arrays[3:]) == on_cuda()


@pytest.mark.parametrize(
    ("size", "dtype", "lanes"),
    [(64, mx.bfloat16, 8), (128, mx.bfloat16, 16), (96, mx.float16, 4), (256, mx.float32, 32), (224, mx.bfloat16, 4)],
)
def test_a_token_is_shared_by_a_power_of_two_of_lanes(size: int, dtype: mx.Dtype, lanes: int) -> None:
    assert lanes_of(size, dtype) == lanes


def test_a_block_serves_as_many_queries_as_its_registers_hold() -> None:
    assert [queries_at_once(7, 8), queries_at_once(24, 8), queries_at_once(11, 8), queries_at_once(2, 56)] == [
        7,
        8,
        1,
        1,
    ]


def test_rows_are_shared_by_blocks_where_there_are_few() -> None:
    assert [num_parts(2, 1024), num_parts(256, 1024), num_parts(1024, 1024), num_parts(1024, 256)] == [16, 4, 2, 1]
