"""Engines with quantized bases give the greedy tokens of mlx-lm, however the weights are kept."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.load import load_shared_model
from parallm.model.lora.linear import LoraLinear
from parallm.model.quantized import UnpackingLinear
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.types import Completion, GenerationRequest

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "mistral", "mixtral", "olmo2"]
ARCHITECTURES += ["cohere", "starcoder2", "gpt_neox", "gpt2", "gpt_bigcode", "mamba", "jamba"]
KEPT = {"packed": UnpackingLinear, "unpacked": nn.Linear}
LENGTHS = (5, 1, 23, 2, 9, 37, 3, 14)
NUM_TOKENS = 10

Ask = Callable[..., GenerationRequest]
Complete = Callable[..., dict[str, list[Completion]]]
Tokens = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [[int(token) for token in random.integers(2, 385, length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]]) -> Callable[[Path], Tokens]:
    """mlx-lm's greedy tokens for each prompt, from a plain model of its own."""

    @cache
    def generate(folder: Path) -> Tokens:
        model, _ = load_model(folder)
        assert any(isinstance(module, nn.QuantizedLinear) for module in model.modules())
        return [
            tuple(int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=NUM_TOKENS))
            for prompt in prompts
        ]

    return generate


def kept(folder: Path, how: str) -> ModelSettings:
    return ModelSettings(path=str(folder), quantized=how, lora=LoraSettings(rank=4))  # type: ignore[arg-type]


def cases() -> list[Any]:
    """All of llama, a mixture and a recurrence; of the others 4 bits packed, and the other two as slow."""
    quick = ("llama", "mixtral", "mamba")
    return [
        pytest.param(name, *kind, marks=() if place == 0 or name in quick else pytest.mark.slow)
        for name in ARCHITECTURES
        for place, kind in enumerate(((4, "packed"), (4, "unpacked"), (8, "packed")))
    ]


@pytest.mark.cpu
@pytest.mark.parametrize(("architecture", "bits", "how"), cases())
def test_requests_that_come_and_go_get_the_tokens_of_mlx_lm(
    architecture: str,
    bits: int,
    how: str,
    prompts: list[list[int]],
    tiny_quantized: Callable[..., Path],
    reference: Callable[[Path], Tokens],
    ask: Ask,
    complete: Complete,
) -> None:
    folder = tiny_quantized(architecture, bits=bits)
    model = load_shared_model(kept(folder, how))
    kinds = {type(layer.linear) for layer in model.base.modules() if isinstance(layer, LoraLinear)}
    assert KEPT[how] in kinds
    assert nn.QuantizedLinear not in kinds
    requests = [ask(str(place), prompt, NUM_TOKENS) for place, prompt in enumerate(prompts)]
    made = complete(model, requests, apart=1)
    assert [made[request.request_id][0].tokens for request in requests] == reference(folder)


@pytest.mark.cpu
@pytest.mark.parametrize(("mode", "bits"), [("mxfp4", 4), ("mxfp8", 8)])
def test_formats_without_floating_scales_give_the_tokens_of_mlx_lm_too(
    mode: str,
    bits: int,
    prompts: list[list[int]],
    tiny_quantized: Callable[..., Path],
    reference: Callable[[Path], Tokens],
    ask: Ask,
    complete: Complete,
) -> None:
    folder = tiny_quantized("llama", bits=bits, mode=mode)
    for how in KEPT:
        requests = [ask(str(place), prompt, NUM_TOKENS) for place, prompt in enumerate(prompts)]
        made = complete(load_shared_model(kept(folder, how)), requests)
        assert [made[request.request_id][0].tokens for request in requests] == reference(folder)


@pytest.mark.cpu
def test_log_probs_are_the_same_to_the_bit_packed_and_unpacked(
    prompts: list[list[int]],
    tiny_quantized: Callable[..., Path],
    ask: Ask,
    complete: Complete,
    random_adapter: Callable[..., Adapter],
) -> None:
    found = []
    for how in KEPT:
        model = load_shared_model(kept(tiny_quantized("starcoder2", bits=4), how))  # its linear layers have biases
        table = AdapterTable()
        table.publish(random_adapter(model, 1))
        names = ["base", "policy"] * 4
        requests = [
            ask(str(place), prompt, 8, model=name, temperature=1.0, seed=place)
            for place, (prompt, name) in enumerate(zip(prompts, names, strict=True))
        ]
        made = complete(model, requests, table=table)
        found.append([made[request.request_id][0].logprobs for request in requests])
    assert found[0] == found[1]
