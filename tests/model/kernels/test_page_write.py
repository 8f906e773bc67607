"""Writing into pages against plain indexing: its threads one after the other in Python, the kernel on a GPU."""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from parallm.model.kernels import page_write
from parallm.model.kernels.columns import columns_of
from parallm.model.kernels.cuda import has_kernels
from parallm.model.kernels.decode_attention import RotaryAngles
from parallm.model.kernels.page_write import PAGE, write_pages

HEADS, REPEATS, SIZE = 2, 3, 32
SLOTS = [3 * PAGE + 5, 3 * PAGE + 6, 1 * PAGE + PAGE - 1, 2 * PAGE, 0]


def fake_kernel(_: str, defines: tuple[tuple[str, Any], ...]) -> Any:
    """Stands in for `cuda.kernel`; writes into the pools, as the kernel does."""
    c = dict(defines)
    size = 16 // c["T"].size
    vectors, turned = c["D"] // size, c["DIMS"] // size
    units = vectors - (0 if c["PAIRED"] else turned // 2)
    of_queries, of_keys = c["H"] * c["G"] * units, c["H"] * units

    def run(inputs: Sequence[np.ndarray], scalars: Sequence[int], **launch: Any) -> list[mx.array]:
        queries, keys, values, key_pages, value_pages, slots, angles = (np.asarray(array) for array in inputs)
        tokens, *places = scalars
        output = np.full(launch["output_shapes"][0], np.nan, np.float32)
        written = 0

        def turn(first: np.ndarray, second: np.ndarray, angle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            cos, sin = angle[..., 0], angle[..., 1]
            return first * cos - second * sin, first * sin + second * cos

        for index in range(launch["grid"][0]):
            token, unit = divmod(index, of_queries + of_keys + c["H"] * vectors)
            if token >= tokens:
                continue
            page, position = divmod(int(slots[token]), c["PAGE"])

            def heads_of(array: np.ndarray, place: int, head: int, token: int = token) -> np.ndarray:
                start = places[2 * place] + token * places[2 * place + 1] + head * c["D"]
                return array.reshape(-1)[start : start + c["D"]]

            if unit >= of_queries + of_keys:
                head, vector = divmod(unit - of_queries - of_keys, vectors)
                part = slice(vector * size, (vector + 1) * size)
                value_pages[page, head, position, part] = heads_of(values, 2, head)[part]
                written += size
                continue
            is_key = unit >= of_queries
            head, unit = divmod(unit - of_queries * is_key, units)
            source = heads_of(keys, 1, head) if is_key else heads_of(queries, 0, head)
            target = key_pages[page, head, position] if is_key else output[token, head]
            low = slice(unit * size, (unit + 1) * size)
            high = slice((unit + turned // 2) * size, (unit + turned // 2 + 1) * size)
            if c["PAIRED"]:
                found = source[low].copy()
                if unit < turned:
                    angle = angles[token, unit * size // 2 : (unit + 1) * size // 2]
                    found[::2], found[1::2] = turn(found[::2], found[1::2], angle)
                target[low] = found
                written += size
            elif unit < turned // 2:
                target[low], target[high] = turn(source[low], source[high], angles[token, low])
                written += 2 * size
            else:
                target[high] = source[high]
                written += size
        assert written == tokens * c["H"] * (c["G"] + 2) * c["D"]
        return [mx.array(output)]

    return run


def rotary_of(dims: int, *, traditional: bool) -> RotaryAngles:
    angle = mx.random.normal((len(SLOTS), dims // 2), key=mx.random.key(3))
    return RotaryAngles(angles=mx.stack([mx.cos(angle), mx.sin(angle)], axis=-1), traditional=traditional)


def turned(heads_MXD: mx.array, rotary: RotaryAngles | None) -> mx.array:
    """Rotated heads, with MLX's operations."""
    if rotary is None:
        return heads_MXD
    dims = 2 * rotary.angles.shape[1]
    cos, sin = rotary.angles[:, None, :, 0], rotary.angles[:, None, :, 1]
    pairs = (slice(0, dims, 2), slice(1, dims, 2)) if rotary.traditional else (slice(dims // 2), slice(dims // 2, dims))
    first, second = (heads_MXD[..., part].astype(mx.float32) for part in pairs)
    result = mx.array(heads_MXD)
    result[..., pairs[0]] = (first * cos - second * sin).astype(heads_MXD.dtype)
    result[..., pairs[1]] = (first * sin + second * cos).astype(heads_MXD.dtype)
    return result


def joined(dtype: mx.Dtype) -> mx.array:
    return mx.random.normal((len(SLOTS), 1, HEADS * (REPEATS + 2) * SIZE), key=mx.random.key(1)).astype(dtype)


def heads_of(whole: mx.array, *, beside: bool) -> list[mx.array]:
    widths = [HEADS * REPEATS * SIZE, HEADS * SIZE, HEADS * SIZE]
    parts = columns_of(whole, widths) if beside else mx.split(whole, [widths[0], widths[0] + widths[1]], axis=-1)
    return [part.reshape(len(SLOTS), 1, -1, SIZE).transpose(0, 2, 1, 3) for part in parts]


ROTARIES = {
    "none": None,
    "halves": rotary_of(SIZE, traditional=False),
    "part of a head": rotary_of(SIZE // 2, traditional=False),
    "neighbours": rotary_of(SIZE, traditional=True),
    "part, neighbours": rotary_of(SIZE // 2, traditional=True),
}


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("name", ROTARIES)
def test_threads_write_each_head_to_its_place(name: str, beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_write, "kernel", fake_kernel)
    rotary, heads = ROTARIES[name], heads_of(joined(mx.float32), beside=beside)
    pools = [np.full((4, HEADS, PAGE, SIZE), np.nan, np.float32) for _ in range(2)]
    key_pool, value_pool = (cast(mx.array, _Pool(pool)) for pool in pools)  # which the fake writes into
    found = write_pages(heads, key_pool, value_pool, mx.array(SLOTS, mx.int32), rotary)
    queries, keys = (turned(array[:, :, 0], rotary) for array in heads[:2])
    assert mx.allclose(found, queries, atol=1e-6).item()
    for pool, expected in zip(pools, (keys, heads[2][:, :, 0]), strict=True):
        written = np.stack([pool[slot // PAGE, :, slot % PAGE] for slot in SLOTS])
        assert np.allclose(written, np.array(expected), atol=1e-6)
        assert np.isnan(pool).sum() == pool.size - written.size


class _Pool:
    """An array of numpy that says its type as MLX's arrays do."""

    dtype = mx.float32

    def __init__(self, array: np.ndarray) -> None:
        self.shape, self._array = array.shape, array

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return self._array


@pytest.mark.skipif(not has_kernels(), reason="needs MLX's CUDA build")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("name", ROTARIES)
def test_the_kernel_writes_each_head_to_its_place(name: str, beside: bool, dtype: mx.Dtype) -> None:
    rotary, heads = ROTARIES[name], heads_of(joined(dtype), beside=beside)
    pools = [mx.full((4, HEADS, PAGE, SIZE), -5.0, dtype) for _ in range(2)]
    mx.eval(pools)
    found = write_pages(heads, pools[0], pools[1], mx.array(SLOTS, mx.int32), rotary)
    mx.eval(found)
    queries, keys = (turned(array[:, :, 0], rotary) for array in heads[:2])
    close = 1e-5 if dtype == mx.float32 else 0.04
    assert mx.allclose(found, queries, atol=close).item()
    for pool, expected in zip(pools, (keys, heads[2][:, :, 0]), strict=True):
        written = mx.stack([pool[slot // PAGE, :, slot % PAGE] for slot in SLOTS])
        assert mx.allclose(written, expected, atol=close).item()
        assert (pool == -5.0).sum().item() == pool.size - written.size
