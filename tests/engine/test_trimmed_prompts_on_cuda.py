"""Prompts whose last layer ends with the tokens that are read, with LoRA of several versions, on a GPU."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama, qwen3

from parallm.engine import flat_prefill
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.kernels.cuda import has_kernels
from parallm.model.layers import trimmed_last_layer
from parallm.types import BASE, Completion, GenerationRequest
from tests.learner.test_training_on_cuda import model_of

LENGTHS = (300, 7, 64, 129, 90, 31)


@pytest.mark.skipif(not has_kernels(), reason="needs MLX's CUDA build")
@pytest.mark.parametrize("module", [llama, qwen3])
@pytest.mark.parametrize("names", [[BASE], ["policy"], ["policy", "other"]])
def test_prompts_give_what_the_whole_last_layer_gives(
    module: object,
    names: list[str],
    complete: Callable[..., dict[str, list[Completion]]],
    ask: Callable[..., GenerationRequest],
    random_adapter: Callable[..., Adapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(module, mx.bfloat16)
    requests = [
        ask(str(place), [5 + (place + step * step) % 300 for step in range(length)], 1, model=names[place % len(names)])
        for place, length in enumerate(LENGTHS)
    ]
    num_trimmed = 0

    def noted(*arguments: Any) -> Any:
        nonlocal num_trimmed
        num_trimmed += 1
        return trimmed_last_layer(*arguments)

    def logprobs(trimmed_from: int, versions: tuple[int, int]) -> np.ndarray:
        monkeypatch.setattr(flat_prefill, "TRIMMED_FROM", trimmed_from)
        table = AdapterTable()
        for name, version in zip(("policy", "other"), versions, strict=True):
            table.publish(random_adapter(model, version, name=name, rank=8, size=0.1))
        completions = complete(model, requests, table=table)
        return np.array([one.logprobs[0] for some in completions.values() for one in some])

    monkeypatch.setattr(flat_prefill, "trimmed_last_layer", noted)
    whole = logprobs(1 << 20, (1, 2))
    assert num_trimmed == 0
    trimmed = logprobs(0, (1, 2))
    assert num_trimmed > 0
    assert np.abs(trimmed - whole).max() < 0.02
    if names != [BASE]:
        assert np.abs(logprobs(0, (3, 4)) - whole).max() > 0.1, "other versions give other numbers"
