"""How many experts the learner's forward chooses otherwise than the engine's steps did, for the same tokens."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest

from parallm.learner.passes.packing import Segment, packed_hidden
from parallm.model.adapters.adapter import Adapter
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.experts import Routing
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.single import single_lora
from parallm.model.patches.experts import SortedExperts
from parallm.model.patches.forward import origin_of
from parallm.model.shared_model import SharedModel

PROMPT, NEW = 40, 24
ENDS = ("down_proj", "fc2")
Routes = dict[str, list[tuple[int, ...]]]
"""For each layer the experts of each token, in order."""


class RecordedLora:
    """A binding that notes the experts of all tokens."""

    def __init__(self, lora: LoraBinding) -> None:
        self._lora = lora
        self.routes: Routes = {}

    def apply(self, target: str, x: mx.array, y: mx.array) -> mx.array:
        return self._lora.apply(target, x, y)

    def apply_experts(self, target: str, x: mx.array, y: mx.array, routing: Routing) -> mx.array:
        if target.endswith(ENDS):
            self.routes.setdefault(target, []).extend(chosen_experts(routing))
        return self._lora.apply_experts(target, x, y, routing)

    def dora_scale(self, target: str) -> mx.array | None:
        return self._lora.dora_scale(target)


def chosen_experts(routing: Routing) -> list[tuple[int, ...]]:
    origin = origin_of(routing.experts)
    if not isinstance(origin, SortedExperts):
        return [tuple(sorted(row)) for row in np.array(routing.experts).reshape(-1, routing.experts.shape[-1]).tolist()]
    by_token: list[list[int]] = [[] for _ in range(origin.num_tokens)]
    for token, expert in zip(origin.tokens_N.tolist(), routing.experts.tolist(), strict=True):
        by_token[token].append(expert)
    return [tuple(sorted(row)) for row in by_token]


def changed(one: Routes, other: Routes) -> float:
    """Share of the tokens' choices in all layers that differ."""
    pairs = [pair for target in one for pair in zip(one[target], other[target], strict=True)]
    return sum(first != second for first, second in pairs) / len(pairs)


def stepwise(model: SharedModel, lora: LoraBinding, tokens: Sequence[int]) -> Routes:
    """The routes of a prompt in one forward, and of each token after it in a step of its own."""
    recorded, cache = RecordedLora(lora), model.make_cache()
    for start, end in [(0, PROMPT), *((place, place + 1) for place in range(PROMPT, len(tokens)))]:
        mx.eval(model.hidden(mx.array([tokens[start:end]]), cache, recorded))
    return recorded.routes


def packed(model: SharedModel, lora: LoraBinding, tokens: Sequence[int]) -> Routes:
    """Those of the learner, which computes prompt and completion as one segment."""
    recorded = RecordedLora(lora)
    segment = Segment(prompt=PROMPT, runs=((1, len(tokens) - PROMPT),))
    mx.eval(packed_hidden(model, mx.array(tokens), [segment], recorded))
    return recorded.routes


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "olmoe", "granitemoe"])
def test_the_learner_chooses_the_experts_that_the_engine_chose(
    architecture: str,
    load_tiny: Callable[..., SharedModel],
    random_adapter: Callable[..., Adapter],
    record_property: Callable[[str, object], None],
) -> None:
    model = load_tiny(architecture, targets=("all-linear", "experts"))
    loras = [single_lora(one.arrays, lora_scaling(one, model)) for one in (random_adapter(model, n) for n in (1, 2))]
    tokens = np.random.default_rng(5).integers(2, 385, PROMPT + NEW).tolist()
    sampled, trained = stepwise(model, loras[0], tokens), packed(model, loras[0], tokens)
    record_property("experts.routing_changed", changed(sampled, trained))
    assert changed(sampled, trained) < 0.01
    assert changed(sampled, packed(model, loras[1], tokens)) > 0.05  # another version routes otherwise
