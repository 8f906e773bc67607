"""A packed forward against one row after the other."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import pytest

from parallm.learner.passes.packing import (
    PackedLayer,
    Segment,
    attends_by_rectangles,
    can_pack,
    canonical_size,
    packed_hidden,
    takes_rows,
)
from parallm.model.adapters.initial import initial_arrays
from parallm.model.kernels.rotary import Rotation
from parallm.model.load import load_shared_model
from parallm.model.lora.single import LoraScaling, single_lora
from parallm.model.patches.rotary import install_rotary
from parallm.model.recurrence.rows import PackedRows, Row
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6]]
COMPLETIONS = [[[5, 3, 5], [8, 9, 7], [9, 3]], [[2, 3]]]
SEGMENTS = [Segment(prompt=7, runs=((2, 3), (1, 2))), Segment(prompt=1, runs=((1, 2),))]


def flat() -> mx.array:
    tokens: list[int] = []
    for prompt, completions in zip(PROMPTS, COMPLETIONS, strict=True):
        tokens += prompt + [token for completion in completions for token in completion]
    return mx.array(tokens)


def one_by_one(model: SharedModel) -> mx.array:
    """The same hidden states, each row computed alone."""
    found: list[mx.array] = []
    for prompt, completions in zip(PROMPTS, COMPLETIONS, strict=True):
        rows = [model.hidden(mx.array([prompt + one]), model.make_cache(), None)[0] for one in completions]
        found += [rows[0][: len(prompt)], *(row[len(prompt) :] for row in rows)]
    return mx.concatenate(found)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3", "mixtral", "gpt2"])
def test_packed_hidden_states_are_those_of_single_rows(
    architecture: str, load_tiny: Callable[[str], SharedModel]
) -> None:
    model = load_tiny(architecture)
    assert can_pack(model)
    difference = mx.abs(packed_hidden(model, flat(), SEGMENTS, None) - one_by_one(model)).max()
    assert difference.item() <= 4e-5


def test_a_sliding_window_hides_what_lies_before_it(load_tiny: Callable[[str], SharedModel]) -> None:
    model = load_tiny("gemma3_text")
    long = Segment(prompt=40, runs=((2, 30),))
    tokens = mx.array([(7 * place) % 50 + 1 for place in range(100)])
    packed = packed_hidden(model, tokens, [long], None)
    row = mx.concatenate([tokens[:40], tokens[70:]])[None]
    alone = model.hidden(row, model.make_cache(), None)[0]
    assert mx.abs(packed[70:] - alone[40:]).max().item() <= 1e-4


@pytest.mark.cpu  # kernels would read far outside of such rows
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recurrent_rows_are_packed_in_any_type_unless_they_see_each_other(
    dtype: Literal["float32", "bfloat16"], tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_shared_model(ModelSettings(path=str(tiny_model("qwen3_5")), dtype=dtype))
    assert can_pack(model)
    one_row = PackedRows([Row(start=0, length=9)], 9)  # as if each token saw all before it
    monkeypatch.setattr("parallm.learner.passes.packing.PackedRows", lambda *_: one_row)
    assert not can_pack(model)


@pytest.mark.parametrize(("architecture", "packs"), [("qwen3_moe", True), ("qwen3", False)])
def test_a_mixture_in_16_bits_is_packed_though_a_router_chooses_another_expert(
    architecture: str, packs: bool, load_tiny: Callable[[str], SharedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(load_tiny(architecture), dtype=mx.bfloat16)  # MLX's CPU build multiplies experts in float32 alone
    assert can_pack(model)

    def differing(share: float) -> Callable[..., mx.array]:
        def hidden(*arguments: Any) -> mx.array:
            exact = packed_hidden(*arguments)
            return exact + share * mx.linalg.norm(exact, axis=-1, keepdims=True) / exact.shape[-1] ** 0.5

        return hidden

    monkeypatch.setattr("parallm.learner.passes.packing.packed_hidden", differing(0.1))
    assert can_pack(model) is packs
    monkeypatch.setattr("parallm.learner.passes.packing.packed_hidden", differing(1.0))
    assert not can_pack(model)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "qwen3"])
def test_rows_that_see_each_other_are_not_packed_however_much_rounding_allows(
    architecture: str, load_tiny: Callable[[str], SharedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny(architecture)
    monkeypatch.setattr("parallm.learner.passes.packing._allowed_error", lambda _: 10.0)
    assert can_pack(model)
    monkeypatch.setattr(
        "parallm.learner.passes.packing.packed_hidden",
        lambda model, inputs, _, lora: packed_hidden(model, inputs, [Segment(prompt=inputs.size)], lora),
    )
    assert not can_pack(model)


def test_a_model_with_a_state_is_not_packed(load_tiny: Callable[[str], SharedModel]) -> None:
    assert not can_pack(load_tiny("mamba"))


def test_rows_padded_as_a_gpu_needs_them_give_the_same_hidden_states_and_gradients(
    load_tiny: Callable[[str], SharedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_tiny("qwen3")
    segments = [Segment(prompt=length) for length in (12, 12, 9, 7, 7, 3)] + [Segment(prompt=5, runs=((2, 4),))]
    tokens = mx.array([(7 * place) % 50 + 1 for place in range(63)])
    arrays = initial_arrays(model.targets, 4, mx.random.key(0))
    arrays = {name: array + 0.01 for name, array in arrays.items()}
    scaling = LoraScaling(dict.fromkeys(model.targets, 2.0), {})

    def total(arrays: dict[str, mx.array]) -> mx.array:
        hidden = packed_hidden(model, tokens, segments, single_lora(arrays, scaling))
        return (hidden * mx.sin(mx.arange(hidden.size).reshape(hidden.shape))).sum()

    expected, expected_gradients = mx.value_and_grad(total)(arrays)
    monkeypatch.setattr("parallm.learner.passes.packing._fused_length", lambda: 8)
    found, gradients = mx.value_and_grad(total)(arrays)
    assert abs(found.item() - expected.item()) <= 1e-4
    worst = max(mx.abs(gradients[name] - expected_gradients[name]).max().item() for name in arrays)
    assert worst <= 1e-4


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_heads_are_rotated_from_what_they_were_where_a_kernel_does_it(
    architecture: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_shared_model(ModelSettings(path=str(tiny_model(architecture)), lora=LoraSettings(rank=4)))
    expected, calls = packed_hidden(model, flat(), SEGMENTS, None), []

    def angles(rotation: Rotation, offsets: mx.array) -> mx.array:
        pairs = rotation.dims // 2
        angle = rotation.scale * offsets[:, None] * rotation.base ** (-mx.arange(pairs) / pairs)
        return mx.stack([mx.cos(angle), mx.sin(angle)], axis=-1)

    def rotated(heads: mx.array, angles: mx.array, _: Rotation) -> mx.array:
        calls.append(heads.shape)
        first, second = mx.split(heads, 2, axis=-1)
        cosine, sine = angles[:, None, :, 0], angles[:, None, :, 1]
        return mx.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1)

    for module in ("parallm.model.patches.rotary", "parallm.learner.passes.packing"):
        monkeypatch.setattr(f"{module}.has_kernels", lambda: True)
    monkeypatch.setattr(Rotation, "angles", angles)
    monkeypatch.setattr("parallm.learner.passes.packing.rotated", rotated)
    install_rotary(model.base)
    found = packed_hidden(model, flat(), SEGMENTS, None)
    assert len(calls) == 2 * model.num_layers
    assert mx.abs(found - expected).max().item() <= 1e-5


@pytest.mark.cpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.usefixtures("fused_rows")
def test_layers_that_attend_in_one_launch_give_the_hidden_states_of_single_rows(
    architecture: str, load_tiny: Callable[[str], SharedModel]
) -> None:
    model = load_tiny(architecture)
    assert takes_rows(model)
    assert can_pack(model)
    found = packed_hidden(model, flat(), SEGMENTS, None)
    assert mx.abs(found - one_by_one(model)).max().item() <= 1e-5
    tokens = mx.array([(7 * place) % 50 + 1 for place in range(100)])
    found = packed_hidden(model, tokens, [Segment(prompt=40, runs=((1, 25), (1, 35)))], None)
    alone = model.hidden(mx.concatenate([tokens[:40], tokens[65:]])[None], model.make_cache(), None)[0]
    assert mx.abs(found[65:] - alone[40:]).max().item() <= 1e-4


def test_a_model_without_the_kernels_takes_no_rows(load_tiny: Callable[[str], SharedModel]) -> None:
    assert not takes_rows(load_tiny("llama"))


@pytest.mark.usefixtures("fused_rows")
def test_rows_that_attends_by_rectangles_and_few_are_left_to_cudnn(load_tiny: Callable[[str], SharedModel]) -> None:
    assert attends_by_rectangles([Segment(prompt=600)] * 20)  # of one length: a single call
    assert attends_by_rectangles([Segment(prompt=70, runs=((4, 540), (2, 513)))])
    assert not attends_by_rectangles([Segment(prompt=70, runs=((4, 500), (2, 500)))])
    assert not attends_by_rectangles([Segment(prompt=70, runs=((4, 900), (2, 600)))])
    assert not attends_by_rectangles([Segment(prompt=70, runs=((1, 600),))] * 5)
    layer = PackedLayer([Segment(prompt=600)])
    assert not layer.takes_rows
    assert PackedLayer([Segment(prompt=500)]).takes_rows
    assert takes_rows(load_tiny("llama"))


def test_canonical_sizes_are_few_and_near() -> None:
    sizes = range(1, 70_000)
    assert len({canonical_size(size) for size in sizes}) <= 16 * 7 + 16
    assert all(size <= canonical_size(size) <= max(64, size + 64, size * 17 / 16) for size in sizes)
    assert [canonical_size(size) for size in (1, 5120, 5121, 65_536)] == [64, 5120, 5376, 65_536]


@pytest.mark.usefixtures("fused_rows")
def test_padding_is_seen_by_nobody(load_tiny: Callable[[str], SharedModel]) -> None:
    model = load_tiny("llama")
    inputs = mx.concatenate([flat(), mx.zeros(canonical_size(flat().size) - flat().size, mx.int32)])
    layer = PackedLayer(SEGMENTS, inputs.size - flat().size)
    embedded = model.trunk.embed_tokens(inputs[:, None])
    planted = mx.where(mx.arange(inputs.size)[:, None, None] < flat().size, embedded, mx.nan)
    attention = model.trunk.layers[0].self_attn
    found, expected = attention(planted, None, layer), attention(embedded, None, layer)
    assert mx.array_equal(found[: flat().size], expected[: flat().size]).item()
    assert mx.all(mx.isfinite(found)).item()


PACKED_HYBRIDS = (
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid"),
    *("mamba2", "nemotron_h", "granitemoehybrid", "falcon_h1"),
    *("lfm2", "lfm2_moe"),
)
UNPACKED_HYBRIDS = {
    "kimi_linear": "latent attention with masks of its own",
    "bailing_hybrid": "latent attention with masks of its own",
    "plamo2": "attention without mlx-lm's function",
    "mamba": "a recurrence of its own",
    "jamba": "a recurrence of its own",
    "rwkv7": "tokens shifted by itself",
    "bailing_moe_linear": "a recurrence of its own",
    "baichuan_m1": "keys and values mixed by itself",
}


@pytest.mark.parametrize("architecture", PACKED_HYBRIDS)
def test_packed_rows_of_hybrids_begin_with_the_states_after_their_prompts(
    architecture: str, load_tiny: Callable[[str], SharedModel]
) -> None:
    model = load_tiny(architecture)
    assert can_pack(model)
    expected = one_by_one(model)
    difference = mx.linalg.norm(packed_hidden(model, flat(), SEGMENTS, None) - expected) / mx.linalg.norm(expected)
    assert difference.item() <= 1e-5


@pytest.mark.parametrize("architecture", UNPACKED_HYBRIDS)
def test_other_hybrids_are_seen_to_give_other_numbers(
    architecture: str, load_tiny: Callable[[str], SharedModel]
) -> None:
    assert not can_pack(load_tiny(architecture))
