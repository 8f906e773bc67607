"""Hidden states of some tokens, the last layer's MLP computed for them alone, against all of them."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from parallm.learner.passes.gradient import hidden_at, trims_last_layer
from parallm.learner.passes.packing import Segment, packed_hidden
from parallm.model.adapters.initial import initial_arrays
from parallm.model.lora.single import LoraScaling, single_lora
from parallm.model.shared_model import SharedModel

SEGMENTS = [Segment(prompt=9, runs=((2, 6),)), Segment(prompt=11)]
TOKENS = [(7 * place) % 50 + 1 for place in range(32)]


@pytest.mark.cpu
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3", "qwen3_5"])
@pytest.mark.parametrize(
    "sources",
    [
        pytest.param([8, 9, 10, 11, 12, 13, 15, 19, 31], id="several"),
        pytest.param([30], id="one"),
        # a prompt's last token is the source of the first token of each of its completions
        pytest.param([8] * 20 + list(range(9, 32)), id="more than there are tokens"),
    ],
)
def test_bits_and_gradients_are_those_of_the_whole_layer(
    architecture: str, sources: list[int], load_tiny: Callable[[str], SharedModel]
) -> None:
    model = load_tiny(architecture)
    assert trims_last_layer(model)
    tokens, places = mx.array(TOKENS), np.array(sources, np.int32)
    scaling = LoraScaling(dict.fromkeys(model.targets, 2.0), {})
    arrays = {name: array + 0.01 for name, array in initial_arrays(model.targets, 4, mx.random.key(0)).items()}

    def total(arrays: dict[str, mx.array], trims: bool) -> tuple[mx.array, mx.array]:
        lora = single_lora(arrays, scaling)
        if trims:
            hidden = hidden_at(model, tokens, SEGMENTS, lora, places)
        else:
            hidden = packed_hidden(model, tokens, SEGMENTS, lora)[mx.array(places)]
        return (hidden * mx.sin(mx.arange(hidden.size).reshape(hidden.shape))).sum(), hidden

    (_, expected), gradients = mx.value_and_grad(total)(arrays, False)
    (_, found), trimmed = mx.value_and_grad(total)(arrays, True)
    assert mx.array_equal(found, expected).item()
    for name, gradient in gradients.items():
        assert mx.abs(trimmed[name] - gradient).max().item() <= 1e-5 * mx.abs(gradient).max().item() + 1e-6, name


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3_text", "gpt2", "mamba", "mixtral"])
def test_layers_of_another_form_are_computed_whole(architecture: str, load_tiny: Callable[[str], SharedModel]) -> None:
    assert not trims_last_layer(load_tiny(architecture))
