import gc
import itertools
import operator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from parallm.model.kernels import head_norm, unpack
from parallm.model.kernels.segmented_lora import ShrinkOutput
from parallm.model.patches import forward
from parallm.model.patches.forward import FusedAdd, FusedNorm, QuantizedRowEmbedding, origin_of, set_origin
from tests.model.kernels.cuda_on_cpu import CpuKernels, needs_compiler
from tests.model.lora.test_segmented import random_versions


def test_an_array_is_known_by_itself_and_not_by_what_it_holds() -> None:
    array, alike = mx.zeros(3), mx.zeros(3)
    set_origin(array, "first")
    assert origin_of(array) == "first"
    assert origin_of(alike) is None


def test_nothing_is_kept_longer_than_the_array() -> None:
    before = len(forward._origins)
    array = mx.zeros(3)
    set_origin(array, "gone")
    assert len(forward._origins) == before + 1
    del array
    gc.collect()
    assert len(forward._origins) == before


def fused() -> FusedAdd:
    return FusedAdd(mx.array([1.0, 2.0]), lambda other: other * 100)


def test_a_sum_is_left_to_the_fused_operand() -> None:
    other = mx.array([3.0, 4.0])
    assert (other + fused()).tolist() == (fused() + other).tolist() == [300.0, 400.0]


@pytest.mark.parametrize("other", [1, 1.0, mx.array(1.0), mx.ones((1, 2)), mx.ones(2, mx.float16)])
def test_an_operand_of_another_form_is_added_as_to_any_array(other: mx.array | float) -> None:
    expected: Any = mx.array([1.0, 2.0]) + other
    for total in [other + fused(), fused() + other]:
        assert total.tolist() == expected.tolist()
        assert total.dtype == expected.dtype


def test_it_is_an_array_to_all_else() -> None:
    assert mx.multiply(fused(), 2).tolist() == [2.0, 4.0]
    assert mx.stack([fused(), fused()]).tolist() == [[1.0, 2.0]] * 2
    compiled = mx.compile(lambda x: x + FusedAdd(x * 2, lambda other: other * 100))
    assert compiled(mx.array([1.0, 2.0])).tolist() == [100.0, 200.0]


def layers(
    stream_BTH: mx.array,
    parts: list[mx.array],
    norm: nn.RMSNorm,
    *,
    is_fused: bool,
    lora: ShrinkOutput | None = None,
) -> list[mx.array]:
    """Norms of a stream to which sublayers add; with `is_fused`, their outputs come in parts."""
    normed = [norm(stream_BTH)]
    for parts_SBTH in parts:
        value = parts_SBTH.sum(axis=0).astype(stream_BTH.dtype)
        output = FusedAdd(value, partial(operator.add, value), parts_SBTH, lora=lora) if is_fused else value
        stream_BTH = stream_BTH + output
        normed.append(norm(stream_BTH))
    return [*normed, stream_BTH]


@pytest.mark.parametrize("is_served", [False, True])
@pytest.mark.parametrize("has_lora", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_residual_add_and_its_norm_are_one_kernel(
    num_tokens: int, has_lora: bool, is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = random_versions(8, [8], [8], 1, mx.float32).weights
    shrunk = ShrinkOutput(weights=weights, order_B2=mx.zeros((3, 2)), hidden_PBTK=mx.zeros((1, 3, 1, 8)))
    given = shrunk if has_lora else None
    launched: list[tuple[mx.array, mx.array]] = []

    def add_norm(
        parts_SBTH: mx.array | None, stream_BTH: mx.array, weight_H: mx.array, eps: float, *, lora: ShrinkOutput | None
    ) -> tuple[mx.array, ...]:
        assert lora is (None if parts_SBTH is None else given)
        total_BTH = stream_BTH if parts_SBTH is None else stream_BTH + parts_SBTH.sum(axis=0)
        launched.append((stream_BTH, total_BTH))
        return total_BTH, mx.fast.rms_norm(total_BTH, weight_H, eps)

    monkeypatch.setattr(forward, "add_norm", add_norm)
    monkeypatch.setattr(forward, "fits", lambda parts, stream, lora=None: stream.shape[1] == 1)
    norm, plain = FusedNorm(8), nn.RMSNorm(8)
    norm.is_served = lambda: is_served
    norm.weight = plain.weight = mx.random.normal((8,))
    stream_BTH, parts = mx.random.normal((3, num_tokens, 8)), [mx.random.normal((2, 3, num_tokens, 8))] * 3
    found = layers(stream_BTH, parts, norm, is_fused=True, lora=given)
    expected = layers(stream_BTH, parts, plain, is_fused=False)
    assert all(mx.allclose(*pair, atol=1e-5) for pair in zip(found, expected, strict=True))
    assert len(launched) == (3 + is_served if num_tokens == 1 else 0)
    for (_, total), (before, _) in itertools.pairwise(launched):
        assert before is total  # no add by itself is left


@pytest.mark.parametrize("is_served", [False, True])
def test_heads_are_normed_where_they_are_unless_something_is_differentiated(
    is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "fits", lambda *_: False)
    monkeypatch.setattr(head_norm, "fits", lambda heads, _: heads.ndim == 4)
    monkeypatch.setattr(head_norm, "head_norm", lambda heads, weight, eps: heads + weight + eps)
    norm, heads_B1XD = FusedNorm(8), mx.random.normal((3, 1, 2, 8))
    norm.is_served = lambda: is_served
    expected = heads_B1XD + 1 + norm.eps if is_served else mx.fast.rms_norm(heads_B1XD, norm.weight, norm.eps)
    assert mx.allclose(norm(heads_B1XD), expected).item()
    assert mx.allclose(norm(heads_B1XD[0]), mx.fast.rms_norm(heads_B1XD[0], norm.weight, norm.eps)).item()


@needs_compiler
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_a_packed_embedding_are_unpacked_as_by_mlx(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = nn.Embedding(40, 128)
    plain.set_dtype(mx.float16)
    layer = plain.to_quantized(64, bits)
    expected = layer(mx.array([[3], [39]]))
    layer.__class__ = QuantizedRowEmbedding
    monkeypatch.setattr(unpack, "fits", lambda *_: True)
    monkeypatch.setattr(unpack, "kernel", CpuKernels(tmp_path))
    found = layer(mx.array([[3], [39]]))
    assert found.shape == expected.shape == (2, 1, 128)
    assert mx.allclose(found, expected, atol=1e-3).item()
    assert not mx.allclose(found[::-1], expected, atol=1e-3).item()


def test_a_norm_of_another_type_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "fits", lambda *_: True)
    norm, stream_BTH = FusedNorm(8), mx.ones((3, 1, 8), mx.float16)
    found = layers(stream_BTH, [mx.ones((1, 3, 1, 8), mx.float16)], norm, is_fused=True)
    assert found[1].dtype == mx.float32
