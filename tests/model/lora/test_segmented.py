"""The kernels are compared with MLX's operations; these cases are skipped without a GPU."""

from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from parallm.model.kernels.cuda import on_cuda
from parallm.model.kernels.segmented_lora import GroupOutput, GroupWeights, ShrinkOutput, shrink
from parallm.model.lora.segmented import (
    MIN_LONG,
    SegmentedLora,
    add_products,
    order_rows,
    order_tokens,
    pack_lora,
    stack_packed,
)
from parallm.model.lora.single import LoraScaling

needs_cuda = pytest.mark.skipif(not on_cuda(), reason="needs MLX's CUDA build")


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Arrays of each version, and the same as the kernels take them."""

    a_IK: list[mx.array]
    b_RO: list[list[mx.array]]
    """By version, then by target."""
    weights: GroupWeights


def random_versions(inputs: int, widths: list[int], ranks: list[int], count: int, dtype: mx.Dtype) -> Versions:
    """Behind another group's factors."""

    def random(*shape: int) -> mx.array:
        return (mx.random.normal(shape) / 8).astype(dtype)

    a_IK = [random(inputs, sum(ranks)) for _ in range(count)]
    b_RO = [[random(rank, width) for rank, width in zip(ranks, widths, strict=True)] for _ in range(count)]
    targets = tuple(f"s{place}" for place in range(len(widths)))
    flats = []
    for a, b in zip(a_IK, b_RO, strict=True):
        parts = mx.split(a, [sum(ranks[:end]) for end in range(1, len(ranks))], axis=1) if len(ranks) > 1 else [a]
        matrices = dict(zip(targets, zip(parts, b, strict=True), strict=True)) | {
            "first": (random(16, 8), random(8, 24))
        }
        arrays = {f"{target}.lora_a": a_IR.astype(mx.float32) for target, (a_IR, _) in matrices.items()}
        arrays |= {f"{target}.lora_b": b_RO.astype(mx.float32) for target, (_, b_RO) in matrices.items()}
        flat = pack_lora(arrays, LoraScaling(dict.fromkeys(matrices, 1.0), {}, dtype), [("first",), targets], dtype)
        assert flat is not None
        flats.append(flat)
    assert len({flat.layout for flat in flats}) == 1
    weights = SegmentedLora(weights=stack_packed(flats), order_B2=order_rows([0], 1)).of_group(targets)
    assert weights is not None
    return Versions(a_IK=a_IK, b_RO=b_RO, weights=weights)


def products_of(
    y: mx.array, x: mx.array, widths: list[int], weights: GroupWeights | None, order_B2: mx.array | None
) -> GroupOutput:
    if weights is None or order_B2 is None:
        return GroupOutput(y[None], x.dtype, widths, None)
    lora = ShrinkOutput(weights=weights, order_B2=order_B2, hidden_PBTK=shrink(x, weights, order_B2))
    return GroupOutput(y[None], x.dtype, widths, lora)


def expected(
    y: mx.array, x: mx.array, widths: list[int], ranks: list[int], versions: Versions | None, index: list[int]
) -> list[mx.array]:
    found, start, column = [], 0, 0
    for target, (width, rank) in enumerate(zip(widths, ranks, strict=True)):
        part = y[..., start : start + width].astype(mx.float32)
        if versions is not None:
            rows = []
            for row, version in enumerate(index):
                if version < 0:
                    rows.append(part[row])
                    continue
                a_IR = versions.a_IK[version][:, column : column + rank].astype(mx.float32)
                b_RO = versions.b_RO[version][target].astype(mx.float32)
                rows.append(part[row] + x[row].astype(mx.float32) @ a_IR @ b_RO)
            part, column = mx.stack(rows), column + rank
        found.append(part)
        start += width
    return found


def split(whole: mx.array, widths: list[int]) -> list[mx.array]:
    parts: list[mx.array] = mx.split(whole, [sum(widths[:end]) for end in range(1, len(widths))], axis=-1)
    return parts


@pytest.mark.parametrize(("widths", "ranks"), [([64], [8]), ([96, 32, 32], [16, 8, 8])])
def test_many_tokens_of_one_version_go_through_plain_products(widths: list[int], ranks: list[int]) -> None:
    versions = random_versions(48, widths, ranks, 1, mx.float32)
    x, y = mx.random.normal((1, 7, 48)), mx.random.normal((1, 7, sum(widths)))
    found = split(add_products(versions.weights, y, x, mx.zeros(7, mx.int32)), widths)
    for one, wanted in zip(found, expected(y, x, widths, ranks, versions, [0]), strict=True):
        assert mx.allclose(one, wanted, atol=1e-5).item()


@pytest.mark.parametrize(("widths", "ranks"), [([64], [8]), ([96, 32, 32], [16, 8, 8])])
def test_tokens_of_several_versions_go_through_plain_products(widths: list[int], ranks: list[int]) -> None:
    versions = random_versions(48, widths, ranks, 3, mx.float32)
    index = [2, 2, 0, -1, 1, 0, 2]
    x, y = mx.random.normal((7, 1, 48)), mx.random.normal((7, 1, sum(widths)))
    found = split(add_products(versions.weights, y, x, mx.array(index, mx.int32)), widths)
    for one, wanted in zip(found, expected(y, x, widths, ranks, versions, index), strict=True):
        assert mx.allclose(one, wanted, atol=1e-5).item()
    for one, other in zip(found, expected(y, x, widths, ranks, versions, [2, 2, 0, -1, 1, 0, 1]), strict=True):
        assert not mx.allclose(one, other, atol=1e-5).item()


@pytest.mark.parametrize("tokens", [MIN_LONG - 1, MIN_LONG])
def test_pairs_of_many_tokens_keep_their_order(tokens: int) -> None:
    index_M = np.arange(tokens, dtype=np.int32) % 3 - 1
    order_M2 = np.array(order_tokens(index_M, 2))
    assert (order_M2[:, 1] == index_M[order_M2[:, 0]]).all()
    assert sorted(order_M2[:, 0]) == list(range(tokens))
    assert (np.diff(order_M2[:, 1]) >= 0).all() == (tokens < MIN_LONG), "kernels want rows of a version side by side"
    ones_M2 = np.array(order_tokens(np.minimum(index_M, 0), 1))
    assert (ones_M2[:, 0] == np.arange(tokens)).all(), "and rows of one version where they are"


@needs_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 1e-3), (mx.bfloat16, 2e-2), (mx.float16, 4e-3)])
@pytest.mark.parametrize(
    ("rows", "tokens", "inputs", "widths", "ranks", "versions"),
    [
        (1, 1, 64, [64], [8], 1),
        (5, 1, 896, [896, 128, 128], [16, 16, 16], 1),
        (5, 1, 896, [896, 128, 128], [16, 16, 16], 0),
        (32, 1, 4096, [4096, 1024, 1024], [16, 16, 16], 8),
        (33, 1, 1000, [72, 200], [8, 24], 3),
        (128, 1, 4864, [896], [64], 2),
        (1, 77, 896, [4864, 4864], [16, 16], 1),
        (32, 1, 4096, [14336, 14336], [16, 16], 8),
        (2, 1, 512, [264, 264], [24, 24], 2),
        (33, 1, 14336, [4096], [16], 8),
        (3, 9, 904, [40, 48], [8, 16], 2),
    ],
)
def test_the_kernels_agree_with_the_operations(
    dtype: mx.Dtype,
    tolerance: float,
    rows: int,
    tokens: int,
    inputs: int,
    widths: list[int],
    ranks: list[int],
    versions: int,
) -> None:
    mx.random.seed(rows * tokens)
    x = (mx.random.normal((rows, tokens, inputs)) / 8).astype(dtype)
    y = mx.random.normal((rows, tokens, sum(widths))).astype(dtype)
    made = random_versions(inputs, widths, ranks, versions, dtype) if versions else None
    index = [(row * 7) % (versions + 1) - 1 if versions > 1 else 0 for row in range(rows)]

    order_B2 = order_rows(index, versions) if versions else None
    products = products_of(y, x, widths, made.weights if made else None, order_B2)
    found, wanted = products.split(), expected(y, x, widths, ranks, made, index)
    if len(widths) == 2 and widths[0] == widths[1]:
        gate, up = (one.astype(dtype).astype(mx.float32) for one in wanted)
        found, wanted = [*found, products.gated()], [*wanted, nn.silu(gate) * up]
    if len(widths) == 1:
        other = mx.random.normal(y.shape).astype(dtype)
        found, wanted = [*found, products.added_to(other)], [*wanted, wanted[0] + other]

    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert one.dtype == dtype
        assert mx.abs(one.astype(mx.float32) - other).max().item() <= tolerance * mx.abs(other).max().item()


@needs_cuda
@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize(("versions", "used"), [(2, [1]), (8, [3, -1, 7, 0]), (16, [9, 2, 15]), (8, [-1])])
def test_versions_that_no_row_uses_change_nothing(rows: int, versions: int, used: list[int]) -> None:
    mx.random.seed(versions)
    x, y = mx.random.normal((rows, 2, 512)) / 8, mx.random.normal((rows, 2, 528))
    made = random_versions(512, [264, 264], [24, 8], versions, mx.float32)
    index = [used[row % len(used)] for row in range(rows)]
    is_used_V1 = mx.array([[version in index] for version in range(versions)])
    weights = replace(made.weights, array_VN=mx.where(is_used_V1, made.weights.array_VN, mx.nan))

    products = products_of(y, x, [264, 264], weights, order_rows(index, versions))

    for one, other in zip(products.split(), expected(y, x, [264, 264], [24, 8], made, index), strict=True):
        assert mx.abs(one - other).max().item() <= 1e-3 * mx.abs(other).max().item()


@needs_cuda
def test_one_version_of_several_is_read_where_it_lies() -> None:
    x, y = mx.random.normal((5, 1, 512)) / 8, mx.random.normal((5, 1, 264))
    made = random_versions(512, [264], [16], 4, mx.float32)
    weights = replace(made.weights, array_VN=made.weights.array_VN[2:3])

    (found,) = products_of(y, x, [264], weights, order_rows([0, -1, 0, 0, 0], 1)).split()

    (wanted,) = expected(y, x, [264], [16], made, [2, -1, 2, 2, 2])
    assert mx.abs(found - wanted).max().item() <= 1e-3 * mx.abs(wanted).max().item()


def test_rows_of_a_version_stand_beside_each_other() -> None:
    assert order_rows([1, -1, 0, 1], 2).tolist() == [[1, -1], [2, 0], [0, 1], [3, 1]]
    assert order_rows([0, -1, 0], 1).tolist() == [[0, 0], [1, -1], [2, 0]]


def test_a_single_row_has_an_array_that_is_kept_on_the_device() -> None:
    assert order_rows([0], 1).tolist() == [[0, 0], [0, -1]]
