"""Greedy tokens of many requests that join and leave are those of mlx-lm's own generate, for each architecture."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from parallm.engine.settings import EngineSettings
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest

BATCHED = ["llama", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3", "mistral"]
BATCHED += ["mixtral", "olmo2", "cohere", "granite", "starcoder2", "gpt_neox", "gpt2"]
ROW_BY_ROW = ["gemma2", "gpt_bigcode", "mamba", "jamba"]
LENGTHS = (5, 1, 23, 2, 9, 37, 3, 14, 4, 60, 7, 12, 31, 6, 18, 11)
MOST_TOKENS = 14
LOADS = ((1, 0), (4, 1), (16, 2), (64, 1))
"""Numbers of requests, and how many steps they come apart."""

Ask = Callable[..., GenerationRequest]
Complete = Callable[..., dict[str, list[Completion]]]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [[int(token) for token in random.integers(2, 385, length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def reference(
    tiny_model: Callable[[str], Path], prompts: Sequence[Sequence[int]]
) -> Callable[[str], list[tuple[int, ...]]]:
    """mlx-lm's greedy tokens for each prompt, from a plain model of its own."""

    @cache
    def generate(architecture: str) -> list[tuple[int, ...]]:
        model, _ = load_model(tiny_model(architecture))
        return [
            tuple(int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=MOST_TOKENS))
            for prompt in prompts
        ]

    return generate


def cases() -> list[Any]:
    """All of llama and mamba; of each other architecture one with many requests, and its other ones as slow."""
    found = []
    for place, architecture in enumerate(BATCHED + ROW_BY_ROW):
        for load in LOADS:
            is_quick = architecture in ("llama", "mamba") or load == LOADS[2 + place % 2]
            found.append(pytest.param(architecture, *load, marks=() if is_quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("architecture", "num_requests", "apart"), cases())
def test_requests_that_come_and_go_get_the_tokens_of_mlx_lm(
    architecture: str,
    num_requests: int,
    apart: int,
    prompts: list[list[int]],
    load_tiny: Callable[..., SharedModel],
    reference: Callable[[str], list[tuple[int, ...]]],
    ask: Ask,
    complete: Complete,
) -> None:
    expected = reference(architecture)
    lengths = [3 + index * 5 % (MOST_TOKENS - 2) for index in range(num_requests)]
    requests = [ask(f"r{index}", prompts[index % 16], lengths[index]) for index in range(num_requests)]
    made = complete(load_tiny(architecture), requests, apart=apart, settings=EngineSettings(prefill_chunk=32))
    assert [made[f"r{index}"][0].tokens for index in range(num_requests)] == [
        expected[index % 16][: lengths[index]] for index in range(num_requests)
    ]


@pytest.mark.parametrize("architecture", BATCHED)
def test_models_with_plain_keys_and_values_batch(architecture: str, load_tiny: Callable[..., SharedModel]) -> None:
    assert load_tiny(architecture).is_batch_invariant


@pytest.mark.parametrize("architecture", ROW_BY_ROW)
def test_models_that_would_not_batch_exactly_run_row_by_row(
    architecture: str, load_tiny: Callable[..., SharedModel]
) -> None:
    assert not load_tiny(architecture).is_batch_invariant
