import mlx.core as mx
import pytest
from mlx_lm.models.base import create_causal_mask

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings
from parallm.model.attention import MIN_ROWS, at_least_rows, attention, product

BLAS = load_blas(DeviceSettings())
needs_strict = pytest.mark.skipif(not BLAS.strict, reason="only a strict BLAS computes a row alike in any company")

SHAPES = [  # B, H, R, T, L, D
    (1, 1, 1, 1, 1, 8),
    (1, 2, 2, 7, 7, 16),
    (3, 2, 1, 1, 50, 16),
    (2, 2, 4, 1, 192, 32),
    (2, 1, 4, 5, 193, 64),
    (1, 4, 2, 200, 500, 16),
    (2, 3, 1, 3, 385, 24),
]


def random(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def inputs(rows: int, heads: int, repeats: int, length: int, positions: int, size: int) -> tuple[mx.array, ...]:
    keys, values = random(rows, heads, positions, size, seed=1), random(rows, heads, positions, size, seed=2)
    return random(rows, heads * repeats, length, size), keys, values


@pytest.mark.parametrize("kind", ["none", "causal", "one", "rows", "heads", "shared heads", "added"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_equals_the_attention_of_mlx(shape: tuple[int, ...], kind: str) -> None:
    rows, heads, repeats, length, positions, _ = shape
    visible = create_causal_mask(length, positions - length)
    shapes = {
        "one": (length, positions),
        "rows": (rows, 1, length, positions),
        "heads": (rows, heads * repeats, length, positions),
        "shared heads": (1, heads * repeats, length, positions),
    }
    masks = {name: visible & (random(*shape, seed=3) > -1) | visible * 0 for name, shape in shapes.items()}
    mask = {"none": None, "causal": "causal", "added": mx.where(visible, 0.0, -1e9)} | {
        name: keep_one(drawn.astype(mx.bool_)) for name, drawn in masks.items()
    }
    queries, keys, values = inputs(*shape)
    ours = attention(queries, keys, values, scale=0.3, mask=mask[kind])
    theirs = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask[kind])
    assert mx.allclose(ours, theirs, atol=1e-5, rtol=0).item()


def keep_one(mask: mx.array) -> mx.array:
    """The first position is visible to all: a row that sees nothing has no attention."""
    return mask | (mx.arange(mask.shape[-1]) == 0)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_is_left_to_mlx(dtype: mx.Dtype) -> None:
    queries, keys, values = (array.astype(dtype) for array in inputs(2, 2, 2, 5, 9, 16))
    theirs = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask="causal")
    assert mx.array_equal(attention(queries, keys, values, scale=0.3, mask="causal"), theirs).item()


@needs_strict
@pytest.mark.parametrize("positions", [2, 4, 11, 50, 192, 193, 400])
@pytest.mark.parametrize("repeats", [1, 3])
def test_the_last_query_alone_gets_the_bits_that_it_gets_with_all_others(positions: int, repeats: int) -> None:
    queries, keys, values = inputs(2, 2, repeats, positions, positions, 32)
    whole = attention(queries, keys, values, scale=0.2, mask="causal")
    alone = attention(queries[:, :, -1:], keys, values, scale=0.2, mask=None)
    assert mx.array_equal(alone, whole[:, :, -1:]).item()


@needs_strict
@pytest.mark.parametrize("view", [12, 40, 193, 384, 1000])
@pytest.mark.parametrize("positions", [1, 4, 11, 50, 192, 193, 200])
def test_hidden_positions_of_longer_rows_change_no_bit(positions: int, view: int) -> None:
    view = max(view, positions)
    queries, keys, values = inputs(1, 2, 2, 1, view, 32)
    seen = (mx.arange(view) < positions)[None, None, None]
    padded = attention(queries, keys, values, scale=0.2, mask=seen)
    alone = attention(queries, keys[:, :, :positions], values[:, :, :positions], scale=0.2, mask=None)
    assert mx.array_equal(padded, alone).item()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 9])
def test_a_product_has_the_rows_that_it_was_asked_for(num_rows: int) -> None:
    left, right = random(2, num_rows, 8), random(2, 8, 5, seed=1)
    assert product(left, right).shape == (2, num_rows, 5)
    assert mx.allclose(product(left, right), left @ right, atol=1e-5).item()


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_missing_rows_are_repetitions(num_rows: int) -> None:
    rows = random(num_rows, 6)
    more = at_least_rows(rows, axis=0)
    assert more.shape[0] >= MIN_ROWS
    assert mx.array_equal(more[:num_rows], rows).item()
