"""The kernel that copies prompts into slots against numpy; skipped without MLX's CUDA build."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.slot_copy import MAX_ARRAYS, can_copy, can_copy_out, copy_out, copy_to_slots

needs_cuda = pytest.mark.skipif(not on_cuda(), reason="needs MLX's CUDA build")
ROWS, SLOTS, LENGTHS = [2, 0, 2], [5, 1, 4], [70, 1, 33]


def arrays(shape: Sequence[int], dtype: mx.Dtype, count: int, seed: int) -> list[mx.array]:
    keys = mx.random.split(mx.random.key(seed), count)
    made = [mx.random.normal(shape, key=key).astype(dtype) for key in keys]
    mx.eval(made)
    return made


def numbers(made: Sequence[mx.array]) -> list[np.ndarray]:
    return [np.array(array.astype(mx.float32)) for array in made]


@needs_cuda
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("count", [2, MAX_ARRAYS + 3])
def test_rows_are_copied_to_their_slots_and_nothing_else_is_written(dtype: mx.Dtype, count: int) -> None:
    prompts, pools = arrays((3, 2, 80, 64), dtype, count, 1), arrays((6, 2, 96, 64), dtype, count, 2)
    values, value_pools = arrays((3, 2, 80, 32), dtype, 1, 3), arrays((6, 2, 96, 32), dtype, 1, 4)
    prompts, pools = prompts + values, pools + value_pools
    expected = numbers(pools)
    for pool, prompt in zip(expected, numbers(prompts), strict=True):
        for row, slot, length in zip(ROWS, SLOTS, LENGTHS, strict=True):
            pool[slot, :, :length] = prompt[row, :, :length]
    assert can_copy(prompts, pools)
    assert copy_to_slots(prompts, pools, rows=ROWS, slots=SLOTS, lengths=LENGTHS).tolist() == [0]
    assert all(map(np.array_equal, numbers(pools), expected))


@needs_cuda
def test_a_copy_while_a_step_reads_the_pools_copies_no_pool() -> None:
    prompts, pools = arrays((1, 8, 512, 128), mx.bfloat16, 4, 1), arrays((16, 8, 4096, 128), mx.bfloat16, 4, 2)
    reading = [pool.sum() for pool in pools]
    mx.async_eval(reading)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(copy_to_slots(prompts, pools, rows=[0], slots=[3], lengths=[512]))
    assert mx.get_peak_memory() - before < pools[0].nbytes / 16


@needs_cuda
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("count", [2, 2 * MAX_ARRAYS + 3])
@pytest.mark.parametrize(("start", "end"), [(0, 96), (16, 48), (32, 33)])
def test_positions_of_a_slot_are_copied_out(dtype: mx.Dtype, count: int, start: int, end: int) -> None:
    pools = arrays((6, 2, 96, 64), dtype, count, 1)
    expected = mx.concatenate([pool[4:5, :, start:end] for pool in pools])
    assert can_copy_out(pools)
    assert mx.array_equal(copy_out(pools, 4, start, end), expected).item()


def test_the_kernel_is_not_used_on_a_cpu() -> None:
    pair = arrays((2, 2, 16, 64), mx.float32, 2, 1), arrays((4, 2, 32, 64), mx.float32, 2, 2)
    assert can_copy(*pair) == on_cuda()
    assert can_copy_out(pair[1]) == on_cuda()
