"""Memory of a pass: its number of tokens, its logits, and gradient checkpointing by layer. The learners call it.

A checkpointed layer keeps its input and computes its forward again in the backward: one hidden state per token and
layer, for about a third more computing (https://arxiv.org/abs/1604.06174).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from parallm.device.memory import device_memory
from parallm.errors import ConfigError
from parallm.learner.settings import LearnerSettings
from parallm.model.kernels.cuda import on_cuda
from parallm.model.layers import has_layers, replaced_layers
from parallm.model.lora.linear import LoraContext, LoraExperts, LoraLinear
from parallm.model.lora.single import SingleLora
from parallm.model.lora.targets import EXPERTS, shape_of
from parallm.model.lora.training import DropoutLora, TrainingLora
from parallm.model.shared_model import SharedModel

MULTIPLYING = nn.Linear | nn.QuantizedLinear | EXPERTS
PASS_TOKENS = 1024
MAX_CUDA_PASS_TOKENS = 64 * PASS_TOKENS
"""Longer passes of a small model (25.7M parameters) are no faster, and decoding waits for them."""
CUDA_PASS_SHARE = 0.22
"""Share of the device memory beside the base that `auto` fills on CUDA: 5,120 tokens of an 8B shape on an H200, where
4 rows of 1,024 are 9% faster than 2, and 1% slower than 8, which need 12 GB more. Not measured on Metal, where longer
passes would lengthen the longest wait of decoding."""
MIXTURE_PASS_SHARE = 0.45
"""The same for a mixture, whose experts get few rows each and whose launches take longer than its products: 4,608
tokens of Qwen3-30B-A3B take 0.86 s in one pass, 1.24 s in two and 1.59 s in three (H200)."""
ACTIVATION_SHARE = 0.5
"""Share of the device memory beside the base that passes at the same time may keep."""
LOGITS_CHUNKS = 4
"""Logits of two chunks exist at the same time, and their gradients."""
CHUNKS_OF_PASS = 48
"""Two chunks of logits and their gradients take a twelfth of the memory of all logits. `pass_tokens` counts chunks of
the smallest size alone."""
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 64 << 20, 512 << 20
"""Products and softmaxes of few tokens leave most of a GPU idle: an update of a 0.5B shape on an H200, whose passes
have 9 GB of logits, takes 0.297 s with chunks of 64 MiB, 0.285 s with 256, 0.271 s with 512."""


def pass_tokens(settings: LearnerSettings, model: SharedModel) -> int:
    """Tokens of one forward and backward pass, padding included."""
    if settings.micro_batch_tokens != "auto":
        return settings.micro_batch_tokens
    if not on_cuda():
        return PASS_TOKENS
    share = MIXTURE_PASS_SHARE if model.experts_per_token > 1 else CUDA_PASS_SHARE
    chunk_bytes = MIN_CHUNK_BYTES if settings.head_chunk_bytes == "auto" else settings.head_chunk_bytes
    free = share * max(0, device_memory() - model.base_bytes) - LOGITS_CHUNKS * chunk_bytes
    units = int(free / activation_bytes(model)) // PASS_TOKENS
    return min(max(1, units) * PASS_TOKENS, MAX_CUDA_PASS_TOKENS)


def head_chunk_bytes(settings: LearnerSettings, model: SharedModel, num_tokens: int) -> int:
    """Bytes of the logits that a pass of `num_tokens` computes at once."""
    if settings.head_chunk_bytes != "auto":
        return settings.head_chunk_bytes
    whole = num_tokens * model.vocabulary_size * model.dtype.size
    return min(max(whole // CHUNKS_OF_PASS, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


def checkpoints_layers(settings: LearnerSettings, model: SharedModel, num_tokens: int) -> bool:
    """Whether passes with `num_tokens` at the same time checkpoint their layers.

    Raises ConfigError if the settings demand it and the model does not support it.
    """
    supported = has_layers(model)
    if settings.checkpoint_layers == "all" and not supported:
        raise ConfigError(
            "learner.checkpoint_layers=all: this architecture does not keep its layers in a list called layers; use "
            "none, and a smaller learner.micro_batch_tokens"
        )
    if settings.checkpoint_layers != "auto":
        return settings.checkpoint_layers == "all"
    return supported and not _fits(model, num_tokens)


def overlaps_passes(model: SharedModel, num_tokens: int, *, checkpoints: bool) -> bool:
    """Whether a pass of `num_tokens` may begin while another ends: on CUDA, if memory holds what both keep."""
    return on_cuda() and (checkpoints or _fits(model, 2 * num_tokens))


def _fits(model: SharedModel, num_tokens: int) -> bool:
    """Whether passes keep no more than their share of the memory."""
    limit = ACTIVATION_SHARE * max(0, device_memory() - model.base_bytes)
    return num_tokens * activation_bytes(model) <= limit


def activation_bytes(model: SharedModel) -> int:
    """Bytes that a pass keeps per token: about the inputs and outputs of all linear layers but the head, whose logits
    are not kept, and of a mixture's layers for each expert that a token chooses. Inputs that layers share count for
    each, in place of what other operations keep."""
    layers = [module for module in model.trunk.modules() if isinstance(module, MULTIPLYING)]
    columns = [
        sum(shape_of(layer)[-2:]) * (model.experts_per_token if isinstance(layer, EXPERTS) else 1) for layer in layers
    ]
    return sum(columns) * model.dtype.size


@contextmanager
def checkpointed(model: SharedModel, enabled: bool) -> Iterator[None]:
    """If `enabled`, graphs built inside the block keep only the inputs of layers."""
    if not enabled:
        yield
        return
    with replaced_layers(model, [_CheckpointedLayer(layer, model.lora_context) for layer in model.trunk.layers]):
        yield


@contextmanager
def cut_trunk(model: SharedModel, num_parts: int) -> Iterator[list[mx.array]]:
    """Hidden states between layers of graphs built inside the block, in order: what cuts a trunk into equal parts.
    None where the model's layers cannot be exchanged."""
    cuts: list[mx.array] = []
    if not has_layers(model):
        yield cuts
        return
    layers = model.trunk.layers
    length = -(-len(layers) // num_parts)
    cut = [_CutLayer(layer, cuts) if place % length == 0 else layer for place, layer in enumerate(layers)]
    with replaced_layers(model, cut):
        yield cuts


@dataclass(frozen=True, slots=True)
class _CutLayer:
    """Replaces a layer while a pass is built."""

    layer: nn.Module
    cuts: list[mx.array]

    def __call__(self, x: mx.array, *arguments: Any, **options: Any) -> Any:
        self.cuts.append(x)
        return self.layer(x, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


@dataclass(frozen=True, slots=True)
class _CheckpointedLayer:
    """Replaces a layer while a pass is built."""

    layer: nn.Module
    lora_context: LoraContext

    def __call__(self, x: mx.array, *arguments: Any, **options: Any) -> Any:
        lora = self.lora_context.lora
        if not isinstance(lora, SingleLora | DropoutLora | TrainingLora):
            return self.layer(x, *arguments, **options)
        targets = [module.target for module in self.layer.modules() if isinstance(module, LoraLinear | LoraExperts)]
        adapter = (lora if isinstance(lora, SingleLora) else lora.adapter).only(targets)
        structure = adapter.structure()

        others = [leaf for _, leaf in tree_flatten([arguments, options]) if isinstance(leaf, mx.array)]

        def compute(x: mx.array, arrays: list[mx.array], others: list[mx.array]) -> Any:
            part = structure.lora(arrays)
            given = iter(others)
            traced_arguments, traced_options = tree_map(
                lambda leaf: next(given) if isinstance(leaf, mx.array) else leaf, (arguments, options)
            )
            with self.lora_context.applied(part if isinstance(lora, SingleLora) else replace(lora, adapter=part)):
                return self.layer(x, *traced_arguments, **traced_options)

        # gradients reach arguments of `compute`, not its closure; some layers are given values of earlier ones
        return mx.checkpoint(compute)(x, adapter.arrays(), others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)
