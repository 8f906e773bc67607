"""The kernels are compared with MLX's operations; these cases are skipped without a GPU."""

import mlx.core as mx
import pytest

from parallm.model.cuda import on_cuda
from parallm.model.lora import OneAdapter, join_sites
from parallm.model.row_lora import GroupFactors, group_factors, order_rows, outputs

needs_cuda = pytest.mark.skipif(not on_cuda(), reason="needs MLX's CUDA build")


def factors_of(inputs: int, widths: list[int], ranks: list[int], versions: int, dtype: mx.Dtype) -> GroupFactors:
    def random(*shape: int) -> mx.array:
        return (mx.random.normal(shape) / 8).astype(dtype)

    return GroupFactors(
        a_IK=tuple(random(inputs, sum(ranks)) for _ in range(versions)),
        b_RO=tuple(
            tuple(random(rank, width) for _ in range(versions)) for rank, width in zip(ranks, widths, strict=True)
        ),
    )


def expected(
    y: mx.array, x: mx.array, widths: list[int], factors: GroupFactors | None, index: list[int]
) -> list[mx.array]:
    found, start, column = [], 0, 0
    for site, width in enumerate(widths):
        part = y[..., start : start + width].astype(mx.float32)
        if factors is not None:
            rank = factors.ranks[site]
            rows = []
            for row, version in enumerate(index):
                if version < 0:
                    rows.append(part[row])
                    continue
                a_IR = factors.a_IK[version][:, column : column + rank].astype(mx.float32)
                rows.append(
                    part[row] + x[row].astype(mx.float32) @ a_IR @ factors.b_RO[site][version].astype(mx.float32)
                )
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
    factors = factors_of(inputs, widths, ranks, versions, dtype) if versions else None
    index = [(row * 7) % (versions + 1) - 1 if versions > 1 else 0 for row in range(rows)]

    found = outputs(y, x, widths, factors, order_rows(index, versions) if versions else None)

    for one, other in zip(found, expected(y, x, widths, factors, index), strict=True):
        assert one.shape == other.shape
        assert one.dtype == dtype
        assert mx.abs(one.astype(mx.float32) - other).max().item() <= tolerance * mx.abs(other).max().item()


def test_rows_of_a_version_stand_beside_each_other() -> None:
    assert order_rows([1, -1, 0, 1], 2).tolist() == [[1, -1], [2, 0], [0, 1], [3, 1]]
    assert order_rows([0, -1, 0], 1).tolist() == [[0, 0], [1, -1], [2, 0]]


def adapter(ranks: dict[str, int], **options: dict[str, mx.array]) -> OneAdapter:
    a_IR = {site: mx.ones((16, rank)) for site, rank in ranks.items()}
    b_RO = {site: mx.ones((rank, 8)) for site, rank in ranks.items()}
    joined = join_sites({site: a_IR[site] for site in ("q", "k") if site in a_IR})
    return OneAdapter(a_IR, b_RO, options.get("stretch_O", {}), dict.fromkeys(joined.sites, joined))


GROUPS = (("q", "k"), ("o",))


def test_adapters_of_one_form_are_served_together() -> None:
    found = group_factors([adapter({"q": 8, "k": 8, "o": 16})] * 3, GROUPS, mx.float32)

    assert found is not None
    assert set(found) == set(GROUPS)
    assert [array.shape for array in found["q", "k"].a_IK] == [(16, 16)] * 3
    assert found["o",].ranks == [16]


def test_an_adapter_may_leave_out_whole_groups() -> None:
    found = group_factors([adapter({"q": 8, "k": 8})], GROUPS, mx.float32)

    assert found is not None
    assert set(found) == {("q", "k")}


@pytest.mark.parametrize(
    "adapters",
    [
        [adapter({"q": 8, "k": 8}), adapter({"q": 8, "k": 16})],
        [adapter({"q": 8, "k": 8}), adapter({"q": 8, "k": 8, "o": 8})],
        [adapter({"q": 8, "o": 8})],
        [adapter({"q": 6, "k": 6})],
        [adapter({"q": 8, "k": 8}, stretch_O={"q": mx.ones((8,))})],
    ],
    ids=["other ranks", "other sites", "half a group", "no whole vectors", "DoRA"],
)
def test_what_the_kernels_cannot_serve_is_left_to_the_other_views(adapters: list[OneAdapter]) -> None:
    assert group_factors(adapters, GROUPS, mx.float32) is None


def test_factors_of_another_type_than_the_base_are_left_to_the_other_views() -> None:
    assert group_factors([adapter({"q": 8, "k": 8})], GROUPS, mx.float16) is None
