"""Speculation changes how many tokens a step brings, and nothing else."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings
from parallm.engine.engine import TRAFFIC_CLASSES
from parallm.engine.settings import EngineSettings, SpeculationSettings
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest

LoadTiny = Callable[..., SharedModel]
Ask = Callable[..., GenerationRequest]
Complete = Callable[..., dict[str, list[Completion]]]

BLAS = load_blas(DeviceSettings())
needs_strict = pytest.mark.skipif(not BLAS.strict, reason="only a strict BLAS computes a row alike in any company")
PLAIN = EngineSettings(speculation=SpeculationSettings(method="none"))
SPECULATING = EngineSettings(speculation=SpeculationSettings(method="ngram"))


def repeating(place: int, length: int) -> tuple[int, ...]:
    """A prompt that repeats itself every few tokens."""
    return tuple(5 + (place * 31 + i % (3 + place % 4)) % 300 for i in range(length))


def varied_requests(ask: Ask, **fields: object) -> list[GenerationRequest]:
    kinds = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 12, "min_p": 0.01, "n": 3},
        {"top_logprobs": 3, "logit_bias": ((7, 4.0), (8, -5.0))},
        {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 1.0, "ignore_eos": False, "min_tokens": 6},
        {"temperature": 0.5, "stop_token_ids": tuple(range(2, 40)), "ignore_eos": False},
    ]
    requests = [
        ask(f"r{i}", repeating(i, 7 + 5 * i), 40 + i, seed=i, **(kind | fields)) for i, kind in enumerate(kinds)
    ]
    return [replace(one, traffic=TRAFFIC_CLASSES[place % 3 == 0]) for place, one in enumerate(requests)]


@needs_strict
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3", "gpt2", "mixtral", "olmo2", "gpt_neox"])
def test_completions_are_those_without_speculation_to_the_bit(
    architecture: str, load_tiny: LoadTiny, ask: Ask, complete: Complete
) -> None:
    model, requests = load_tiny(architecture), varied_requests(ask)
    found = complete(model, requests, settings=SPECULATING, apart=3)
    assert found == complete(model, requests, settings=PLAIN, apart=3)
    assert sum(one.num_accepted_tokens for made in found.values() for one in made) > 0
