"""The kernels are compared with MLX's operations; these cases are skipped without a GPU."""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import pytest

from parallm.model.cuda import on_cuda
from parallm.model.lora import OneAdapter, join_sites
from parallm.model.row_lora import (
    MOST_NUMBERS,
    GroupFactors,
    Products,
    RowAdapters,
    flat_factors,
    order_rows,
)

needs_cuda = pytest.mark.skipif(not on_cuda(), reason="needs MLX's CUDA build")


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Arrays of each version, and the same as the kernels take them."""

    a_IK: list[mx.array]
    b_RO: list[list[mx.array]]
    """By version, then by site."""
    factors: GroupFactors


def random_versions(inputs: int, widths: list[int], ranks: list[int], count: int, dtype: mx.Dtype) -> Versions:
    """Behind another group's factors."""

    def random(*shape: int) -> mx.array:
        return (mx.random.normal(shape) / 8).astype(dtype)

    a_IK = [random(inputs, sum(ranks)) for _ in range(count)]
    b_RO = [[random(rank, width) for rank, width in zip(ranks, widths, strict=True)] for _ in range(count)]
    sites = tuple(f"s{place}" for place in range(len(widths)))
    flats = []
    for a, b in zip(a_IK, b_RO, strict=True):
        parts = mx.split(a, [sum(ranks[:end]) for end in range(1, len(ranks))], axis=1) if len(ranks) > 1 else [a]
        a_IR = dict(zip(sites, parts, strict=True)) | {"first": random(16, 8)}
        joined = join_sites({site: a_IR[site] for site in sites})
        one = OneAdapter(
            a_IR, dict(zip(sites, b, strict=True)) | {"first": random(8, 24)}, {}, dict.fromkeys(sites, joined)
        )
        flat = flat_factors(one, [("first",), sites], dtype)
        assert flat is not None
        flats.append(flat)
    assert len({flat.layout for flat in flats}) == 1
    versions = tuple(flat.arrays for flat in flats)
    view = RowAdapters(layout=flats[0].layout, versions=versions, order_B2=order_rows([0], 1))
    factors = view.factors(sites)
    assert factors is not None
    return Versions(a_IK=a_IK, b_RO=b_RO, factors=factors)


def expected(
    y: mx.array, x: mx.array, widths: list[int], ranks: list[int], versions: Versions | None, index: list[int]
) -> list[mx.array]:
    found, start, column = [], 0, 0
    for site, (width, rank) in enumerate(zip(widths, ranks, strict=True)):
        part = y[..., start : start + width].astype(mx.float32)
        if versions is not None:
            rows = []
            for row, version in enumerate(index):
                if version < 0:
                    rows.append(part[row])
                    continue
                a_IR = versions.a_IK[version][:, column : column + rank].astype(mx.float32)
                b_RO = versions.b_RO[version][site].astype(mx.float32)
                rows.append(part[row] + x[row].astype(mx.float32) @ a_IR @ b_RO)
            part, column = mx.stack(rows), column + rank
        found.append(part)
        start += width
    return found


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
    products = Products(y, x, widths, made.factors if made else None, order_B2)
    found, wanted = products.apart(), expected(y, x, widths, ranks, made, index)
    if len(widths) == 2 and widths[0] == widths[1]:
        gate, up = (one.astype(dtype).astype(mx.float32) for one in wanted)
        found, wanted = [*found, products.gated()], [*wanted, nn.silu(gate) * up]

    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert one.dtype == dtype
        assert mx.abs(one.astype(mx.float32) - other).max().item() <= tolerance * mx.abs(other).max().item()


def test_rows_of_a_version_stand_beside_each_other() -> None:
    assert order_rows([1, -1, 0, 1], 2).tolist() == [[1, -1], [2, 0], [0, 1], [3, 1]]
    assert order_rows([0, -1, 0], 1).tolist() == [[0, 0], [1, -1], [2, 0]]


def test_a_single_row_has_an_array_that_is_kept_on_the_device() -> None:
    assert order_rows([0], 1).tolist() == [[0, 0], [0, -1]]


def adapter(ranks: dict[str, int], **options: dict[str, mx.array]) -> OneAdapter:
    a_IR = {site: mx.ones((16, rank)) for site, rank in ranks.items()}
    b_RO = {site: mx.ones((rank, 8)) for site, rank in ranks.items()}
    joined = join_sites({site: a_IR[site] for site in ("q", "k") if site in a_IR})
    return OneAdapter(a_IR, b_RO, options.get("stretch_O", {}), dict.fromkeys(joined.sites, joined))


GROUPS = (("q", "k"), ("o",))


def test_adapters_of_one_form_have_one_layout() -> None:
    found = flat_factors(adapter({"q": 8, "k": 8, "o": 16}), GROUPS, mx.float32)
    again = flat_factors(adapter({"q": 8, "k": 8, "o": 16}), GROUPS, mx.float32)

    assert found is not None
    assert again is not None
    assert found.layout is again.layout
    assert found.layout.groups["q", "k"].starts == (0, 16 * 16, 16 * 16 + 8 * 8)
    assert found.layout.groups["o",].starts == (384, 384 + 16 * 16)
    assert found.layout.groups["o",].ranks == (16,)
    assert [array.shape for array in found.arrays] == [(384 + 256 + 128,)]


def test_factors_of_a_large_model_lie_in_several_arrays() -> None:
    rank = MOST_NUMBERS // 24 // 8 * 8
    found = flat_factors(adapter({"q": 8, "k": 8, "o": rank}), GROUPS, mx.float32)

    assert found is not None
    assert found.layout.num_arrays == 2
    assert found.layout.groups["q", "k"].array == 0
    assert (found.layout.groups["o",].array, found.layout.groups["o",].starts) == (1, (0, 16 * rank))
    assert [array.size for array in found.arrays] == [384, 24 * rank]
    view = RowAdapters(layout=found.layout, versions=(found.arrays,) * 2, order_B2=order_rows([0, 1], 2))
    again = view.structure().view(view.arrays())
    assert [[array.size for array in arrays] for arrays in again.versions] == [[384, 24 * rank]] * 2


def test_an_adapter_may_leave_out_whole_groups() -> None:
    found = flat_factors(adapter({"q": 8, "k": 8}), GROUPS, mx.float32)

    assert found is not None
    assert set(found.layout.groups) == {("q", "k")}


@pytest.mark.parametrize("other", [{"q": 8, "k": 16}, {"q": 8, "k": 8, "o": 8}], ids=["ranks", "sites"])
def test_adapters_of_other_forms_have_other_layouts(other: dict[str, int]) -> None:
    found = [flat_factors(adapter(ranks), GROUPS, mx.float32) for ranks in ({"q": 8, "k": 8}, other)]

    assert found[0] is not None
    assert found[1] is not None
    assert found[0].layout is not found[1].layout


@pytest.mark.parametrize(
    "other",
    [
        adapter({"q": 8, "o": 8}),
        adapter({"q": 6, "k": 6}),
        adapter({"q": 8, "k": 8}, stretch_O={"q": mx.ones((8,))}),
    ],
    ids=["half a group", "no whole vectors", "DoRA"],
)
def test_what_the_kernels_cannot_serve_is_left_to_the_other_views(other: OneAdapter) -> None:
    assert flat_factors(other, GROUPS, mx.float32) is None


def test_factors_of_another_type_than_the_base_are_left_to_the_other_views() -> None:
    assert flat_factors(adapter({"q": 8, "k": 8}), GROUPS, mx.float16) is None
