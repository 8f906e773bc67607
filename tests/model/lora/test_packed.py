"""Adapters that the kernels of `segmented_lora` can serve, and the layout of their weights."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import pytest

from parallm.model.kernels.pack_matrices import MAX_MATRICES
from parallm.model.lora.segmented import MAX_NUMBERS, PackedLora, SegmentedLora, order_rows, pack_lora, stack_packed
from parallm.model.lora.single import LoraScaling

GROUPS = (("q", "k"), ("o",))


def packed(
    ranks: dict[str, int], *, width: int = 8, is_dora: bool = False, dtype: mx.Dtype = mx.float32
) -> PackedLora | None:
    """An adapter of these ranks, packed for a base in float32."""
    arrays = {f"{target}.lora_a": mx.ones((16, rank)) for target, rank in ranks.items()}
    arrays |= {f"{target}.lora_b": mx.ones((rank, width)) for target, rank in ranks.items()}
    norms = {target: mx.ones(width) for target in ranks} if is_dora else {}
    return pack_lora(arrays, LoraScaling(dict.fromkeys(ranks, 2.0), norms, dtype), GROUPS, mx.float32)


def test_adapters_of_one_form_have_one_layout() -> None:
    found = packed({"q": 8, "k": 8, "o": 16})
    again = packed({"q": 8, "k": 8, "o": 16})

    assert found is not None
    assert again is not None
    assert found.layout is again.layout
    assert found.layout.groups["q", "k"].starts == (0, 16 * 16, 16 * 16 + 8 * 8)
    assert found.layout.groups["o",].starts == (384, 384 + 16 * 16)
    assert found.layout.groups["o",].ranks == (16,)
    assert [array.shape for array in found.arrays] == [(1, 384 + 256 + 128)]


def test_factors_of_a_large_model_lie_in_several_arrays() -> None:
    rank = MAX_NUMBERS // 24 // 8 * 8
    found = packed({"q": 8, "k": 8, "o": rank})

    assert found is not None
    assert found.layout.num_arrays == 2
    assert found.layout.groups["q", "k"].array == 0
    assert (found.layout.groups["o",].array, found.layout.groups["o",].starts) == (1, (0, 16 * rank))
    assert [array.size for array in found.arrays] == [384, 24 * rank]
    lora = SegmentedLora(weights=stack_packed([found, found]), order_B2=order_rows([0, 1], 2))
    again = lora.structure().lora(lora.arrays())
    assert [array.shape for array in again.weights.arrays] == [(2, 384), (2, 24 * rank)]


def test_an_adapter_may_leave_out_whole_groups() -> None:
    found = packed({"q": 8, "k": 8})

    assert found is not None
    assert set(found.layout.groups) == {("q", "k")}


@pytest.mark.parametrize("other", [{"q": 8, "k": 16}, {"q": 8, "k": 8, "o": 8}], ids=["ranks", "targets"])
def test_adapters_of_other_forms_have_other_layouts(other: dict[str, int]) -> None:
    found = [packed(ranks) for ranks in ({"q": 8, "k": 8}, other)]

    assert found[0] is not None
    assert found[1] is not None
    assert found[0].layout is not found[1].layout


@pytest.mark.parametrize(
    "other",
    [
        lambda: packed({"q": 8, "o": 8}),
        lambda: packed({"q": 8, "k": 8, "x_proj": 8}),
        lambda: packed({"q": 8, "k": 8}, width=6),
        lambda: packed({"q": 8, "k": 8}, is_dora=True),
        lambda: packed({"q": 8, "k": 8}, dtype=mx.float16),
    ],
    ids=["half a group", "a target in no group", "no whole vectors", "DoRA", "another type than the base"],
)
def test_what_the_kernels_cannot_serve_is_left_to_the_other_views(other: Callable[[], PackedLora | None]) -> None:
    assert packed({"q": 8, "k": 8}) is not None
    assert other() is None


def test_ranks_are_filled_up_and_b_has_the_scale() -> None:
    found = packed({"q": 6, "k": 8})
    assert found is not None
    layout, (numbers_1N,) = found.layout.groups["q", "k"], found.arrays
    assert (layout.ranks, layout.starts) == ((8, 8), (0, 256, 320))
    a_KI, b_q, b_k = numbers_1N[0, :256].reshape(16, 16), numbers_1N[0, 256:320].reshape(8, 8), numbers_1N[0, 320:]
    assert a_KI.sum(axis=1).tolist() == [16] * 6 + [0] * 2 + [16] * 8
    assert b_q.sum(axis=1).tolist() == [16] * 6 + [0] * 2
    assert b_k.tolist() == [2] * 64


def test_many_small_matrices_lie_in_several_arrays() -> None:
    layers = MAX_MATRICES // 4 + 1  # of two targets
    groups = [(f"{layer}.q", f"{layer}.k") for layer in range(layers)]
    arrays = {f"{target}.lora_a": mx.ones((16, 8)) for group in groups for target in group}
    arrays |= {f"{target}.lora_b": mx.ones((8, 8)) for group in groups for target in group}
    scales = {target: 1.0 for group in groups for target in group}
    found = pack_lora(arrays, LoraScaling(scales, {}), groups, mx.float32)
    assert found is not None
    assert [array.size for array in found.arrays] == [(layers - 1) * 2 * 192, 2 * 192]


def test_stacked_versions_lie_in_the_order_in_which_they_are_given() -> None:
    found = packed({"q": 8, "k": 8})
    assert found is not None
    doubled = replace(found, arrays=tuple(2 * array for array in found.arrays))

    stack = stack_packed([doubled, found, doubled])

    assert stack.layout is found.layout
    assert stack.num_versions == 3
    assert stack.arrays[0][:, 0].tolist() == [2, 1, 2]
    assert mx.array_equal(stack.version(1).arrays[0], found.arrays[0]).item()


def test_targets_in_no_group_keep_the_output_of_the_base() -> None:
    found = packed({"q": 8, "k": 8})
    assert found is not None
    y = mx.ones((1, 1, 9))

    assert SegmentedLora(weights=found, order_B2=order_rows([0], 1)).apply("x_proj", mx.ones((1, 1, 16)), y) is y
