"""Adapters that the kernels of `segmented_lora` can serve, and the layout of their weights."""

from dataclasses import replace

import mlx.core as mx
import pytest

from parallm.model.lora.joined import join_a
from parallm.model.lora.segmented import MAX_NUMBERS, SegmentedLora, order_rows, pack_lora, stack_packed
from parallm.model.lora.single import SingleLora


def adapter(ranks: dict[str, int], **options: dict[str, mx.array]) -> SingleLora:
    a_IR = {target: mx.ones((16, rank)) for target, rank in ranks.items()}
    b_RO = {target: mx.ones((rank, 8)) for target, rank in ranks.items()}
    joined = join_a({target: a_IR[target] for target in ("q", "k") if target in a_IR})
    return SingleLora(a_IR, b_RO, options.get("dora_scale_O", {}), dict.fromkeys(joined.targets, joined))


GROUPS = (("q", "k"), ("o",))


def test_adapters_of_one_form_have_one_layout() -> None:
    found = pack_lora(adapter({"q": 8, "k": 8, "o": 16}), GROUPS, mx.float32)
    again = pack_lora(adapter({"q": 8, "k": 8, "o": 16}), GROUPS, mx.float32)

    assert found is not None
    assert again is not None
    assert found.layout is again.layout
    assert found.layout.groups["q", "k"].starts == (0, 16 * 16, 16 * 16 + 8 * 8)
    assert found.layout.groups["o",].starts == (384, 384 + 16 * 16)
    assert found.layout.groups["o",].ranks == (16,)
    assert [array.shape for array in found.arrays] == [(1, 384 + 256 + 128)]


def test_factors_of_a_large_model_lie_in_several_arrays() -> None:
    rank = MAX_NUMBERS // 24 // 8 * 8
    found = pack_lora(adapter({"q": 8, "k": 8, "o": rank}), GROUPS, mx.float32)

    assert found is not None
    assert found.layout.num_arrays == 2
    assert found.layout.groups["q", "k"].array == 0
    assert (found.layout.groups["o",].array, found.layout.groups["o",].starts) == (1, (0, 16 * rank))
    assert [array.size for array in found.arrays] == [384, 24 * rank]
    lora = SegmentedLora(weights=stack_packed([found, found]), order_B2=order_rows([0, 1], 2))
    again = lora.structure().lora(lora.arrays())
    assert [array.shape for array in again.weights.arrays] == [(2, 384), (2, 24 * rank)]


def test_an_adapter_may_leave_out_whole_groups() -> None:
    found = pack_lora(adapter({"q": 8, "k": 8}), GROUPS, mx.float32)

    assert found is not None
    assert set(found.layout.groups) == {("q", "k")}


@pytest.mark.parametrize("other", [{"q": 8, "k": 16}, {"q": 8, "k": 8, "o": 8}], ids=["ranks", "targets"])
def test_adapters_of_other_forms_have_other_layouts(other: dict[str, int]) -> None:
    found = [pack_lora(adapter(ranks), GROUPS, mx.float32) for ranks in ({"q": 8, "k": 8}, other)]

    assert found[0] is not None
    assert found[1] is not None
    assert found[0].layout is not found[1].layout


@pytest.mark.parametrize(
    "other",
    [
        adapter({"q": 8, "o": 8}),
        adapter({"q": 8, "k": 8, "x_proj": 8}),
        adapter({"q": 6, "k": 6}),
        adapter({"q": 8, "k": 8}, dora_scale_O={"q": mx.ones((8,))}),
    ],
    ids=["half a group", "a target in no group", "no whole vectors", "DoRA"],
)
def test_what_the_kernels_cannot_serve_is_left_to_the_other_views(other: SingleLora) -> None:
    assert pack_lora(other, GROUPS, mx.float32) is None


def test_factors_of_another_type_than_the_base_are_left_to_the_other_views() -> None:
    assert pack_lora(adapter({"q": 8, "k": 8}), GROUPS, mx.float16) is None


def test_stacked_versions_lie_in_the_order_in_which_they_are_given() -> None:
    found = pack_lora(adapter({"q": 8, "k": 8}), GROUPS, mx.float32)
    assert found is not None
    doubled = replace(found, arrays=tuple(2 * array for array in found.arrays))

    stack = stack_packed([doubled, found, doubled])

    assert stack.layout is found.layout
    assert stack.num_versions == 3
    assert stack.arrays[0][:, 0].tolist() == [2, 1, 2]
    assert mx.array_equal(stack.version(1).arrays[0], found.arrays[0]).item()


def test_targets_in_no_group_keep_the_output_of_the_base() -> None:
    found = pack_lora(adapter({"q": 8, "k": 8}), GROUPS, mx.float32)
    assert found is not None
    y = mx.ones((1, 1, 9))

    assert SegmentedLora(weights=found, order_B2=order_rows([0], 1)).apply("x_proj", mx.ones((1, 1, 16)), y) is y
