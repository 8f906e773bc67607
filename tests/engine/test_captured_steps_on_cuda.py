"""Replayed steps give the tokens and log-probs of launched ones while rows join and leave and pools grow, on a GPU."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama, qwen3

from parallm.engine.captured_forward import CapturedForward
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.kernels.cuda import has_kernels
from parallm.types import BASE, Completion, GenerationRequest
from tests.learner.test_training_on_cuda import model_of

NUM_REQUESTS = 12


@pytest.mark.skipif(not has_kernels(), reason="needs MLX's CUDA build")
@pytest.mark.parametrize("module", [llama, qwen3])
@pytest.mark.parametrize("names", [[BASE], ["policy"], ["policy", "other", BASE]])
def test_replayed_steps_give_what_launched_ones_give(
    module: object,
    names: list[str],
    complete: Callable[..., dict[str, list[Completion]]],
    ask: Callable[..., GenerationRequest],
    random_adapter: Callable[..., Adapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, call, replayed = model_of(module, mx.bfloat16), CapturedForward.__call__, [0, 0]
    requests = [
        ask(
            str(place),
            [5 + (place + step * step) % 300 for step in range(1 + 29 * place)],
            20 + 15 * place,
            n=1 + place % 4,
            model=names[place % len(names)],
            temperature=1.0,
            seed=place,
        )
        for place in range(NUM_REQUESTS)
    ]

    def completions(*, is_replayed: bool, versions: tuple[int, int]) -> dict[str, list[Completion]]:
        def noted(self: CapturedForward, *given: Any) -> mx.array | None:
            hidden_BH = call(self, *given) if is_replayed else None
            replayed[hidden_BH is not None] += 1
            return hidden_BH

        monkeypatch.setattr(CapturedForward, "__call__", noted)
        table = AdapterTable()
        for name, version in zip(("policy", "other"), versions, strict=True):
            table.publish(random_adapter(model, version, name=name, rank=8, size=0.1))
        return complete(model, requests, apart=3, table=table)

    launched = completions(is_replayed=False, versions=(1, 2))
    assert replayed[0] > 100
    replayed[0] = 0
    assert completions(is_replayed=True, versions=(1, 2)) == launched
    assert replayed[0] == 0, "steps that were not captured"
    if names != [BASE]:
        assert completions(is_replayed=True, versions=(3, 4)) != launched, "other versions sample other tokens"
