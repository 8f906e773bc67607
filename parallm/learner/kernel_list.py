"""The CUDA kernels that a learner launches for a model: found by building a pass, which nothing evaluates."""

from contextlib import suppress
from itertools import chain
from typing import Any

import mlx.core as mx
import numpy as np

from parallm.learner.passes.gradient import LoraWeights
from parallm.learner.passes.packing import Segment, packed_hidden
from parallm.model.adapters.adapter import Adapter
from parallm.model.kernels.compiler import Specialization
from parallm.model.kernels.cuda import has_kernels, listed_kernels
from parallm.model.kernels.delta_chunks import with_any_rows
from parallm.model.kernels.flash_attention import FORWARDS, specializations
from parallm.model.kernels.gather import take_known_rows
from parallm.model.kernels.token_scores import token_scores
from parallm.model.lora.selector import training_lora
from parallm.model.shared_model import SharedModel

SEGMENTS = (Segment(prompt=64, runs=((2, 64), (1, 128))),)
NUM_TOKENS = sum(sum(segment.sizes) for segment in SEGMENTS)


def learner_kernels(model: SharedModel, adapter: Adapter) -> list[Specialization]:
    """The kernels of a pass forward and backward, and of scoring the base. Device thread only."""
    if not has_kernels() or not model.is_batch_invariant:
        return []
    # a model that cannot be packed, see `can_pack`, takes few of them
    with listed_kernels() as kernels, suppress(AssertionError, AttributeError, TypeError, ValueError):
        tokens_M, key = mx.zeros((NUM_TOKENS,), mx.int32), mx.random.key(0)
        policy = LoraWeights(adapter, model).lora
        structure = policy.structure()

        def forward(*traced: mx.array) -> list[mx.array]:
            lora = training_lora(structure.lora(list(traced)), adapter.dropout, key)
            return [
                take_known_rows(packed_hidden(model, tokens_M, SEGMENTS, lora), np.arange(NUM_TOKENS, dtype=np.int32))
            ]

        hidden_MH = packed_hidden(model, tokens_M, SEGMENTS, None)
        mx.vjp(forward, policy.arrays(), [hidden_MH])
        ones_M = mx.ones(NUM_TOKENS)
        token_scores(model.head(hidden_MH), ones_M, tokens_M).gradient(ones_M, None)
    return with_long_prompts(kernels)


def packed_kernels(model: SharedModel) -> list[Specialization]:
    """The kernels of a packed forward of the base without gradients. Device thread only."""
    if not has_kernels() or not model.is_batch_invariant:
        return []
    with listed_kernels() as kernels, suppress(AssertionError, AttributeError, TypeError, ValueError):
        hidden_MH = packed_hidden(model, mx.zeros((NUM_TOKENS,), mx.int32), SEGMENTS, None)
        model.head(hidden_MH[:1])
    return [kernel for kernel in with_long_prompts(kernels) if kernel in kernels or kernel[0] in FORWARDS]


def with_long_prompts(kernels: dict[Specialization, None]) -> list[Specialization]:
    """`kernels` and those with which long prompts attend, and states pass through any number of rows."""
    attention: list[dict[str, Any]] = [dict(defines) for name, defines in kernels if name in FORWARDS]
    variants = [specializations(one["T"], one["HEAD"], one["REPEATS"]) for one in attention]
    return with_any_rows(kernels | dict.fromkeys(chain(*variants)))
