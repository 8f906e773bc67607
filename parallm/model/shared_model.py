"""The frozen base with its LoRA targets: one copy of the weights for serving and learning.

The forward is split in two, trunk (tokens -> hidden states) and head (hidden states -> logits), so that no more logits
are held than needed. Everything here runs on the device thread.

Axes: B rows, T tokens, H hidden, N tokens of any rows, V vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from parallm.model.attention import at_least_rows
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.kernels.cuda import on_cuda
from parallm.model.lora.linear import LoraBinding, LoraContext
from parallm.model.lora.targets import Shape
from parallm.model.patches.forward import OwnCache, Replay
from parallm.model.task_spec import ENCODERS
from parallm.model.tensor_parallel import TensorParallel


class PlainCache(KVCache, OwnCache):
    """One row's keys and values in mlx-lm's format, with our attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedModel:
    """Frozen base arrays, tokenizer and LoRA targets. Built by `load.py`, never changed."""

    name: str
    model_type: str
    """The architecture, by config.json."""
    base: nn.Module
    dtype: mx.Dtype
    """The floating type of the base, in which it computes; see `quantized.cast` for the few arrays of another one."""
    sha256: str
    """The base's fingerprint; see `load.fingerprint`."""
    lora_context: LoraContext
    targets: Mapping[str, Shape]
    """LoRA target -> (inputs, outputs), or (experts, inputs, outputs)."""
    tokenizer: ChatTokenizer
    vocabulary_size: int
    max_context: int
    trunk_owner: nn.Module | None
    """The module whose attribute `trunk_name` maps tokens to hidden states; None: the model cannot be split."""
    trunk_name: str
    joined: tuple[tuple[str, ...], ...] = ()
    """Targets that are called with the same input."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Targets whose outputs are computed at once, with MLX's CUDA build; see `MergedLinear`."""
    is_batch_invariant: bool
    """Whether rows of different lengths can share one forward; see `can_batch`."""
    has_states: bool = False
    """Whether layers keep states beside keys and values, or alone; see `keeps_states`."""
    experts_per_token: int = 1
    """Experts that a mixture's layer computes for each token."""
    parallel: TensorParallel | None = None
    """How the base is cut, if this process holds a part of it."""
    writes_text: bool = True
    """False for encoders, and for trunks without a language model's head."""

    @property
    def is_encoder(self) -> bool:
        """Whether tokens see those after them; see `model/encoders`."""
        return self.model_type in ENCODERS

    @property
    def trunk(self) -> nn.Module:
        """The trunk, or the base where it cannot be split."""
        trunk: nn.Module = self.base if self.trunk_owner is None else getattr(self.trunk_owner, self.trunk_name)
        return trunk

    def hidden(self, tokens_BT: mx.array, cache: Sequence[Any] | None, lora: LoraBinding | None) -> mx.array:
        """Hidden states (B, T, H) before the head; `cache` is written as mlx-lm's models do.

        A model that cannot be split gives its logits here, and `head` passes them on.
        """
        with self.lora_context.applied(lora):
            hidden: mx.array = self.trunk(tokens_BT, cache=cache)
        return hidden

    def head(self, hidden_NH: mx.array) -> mx.array:
        """Logits (N, V) in the model's dtype, final scaling and soft-capping of the architecture included."""
        if self.trunk_owner is None:
            return hidden_NH
        trunk = self.trunk
        padded = hidden_NH if on_cuda() else at_least_rows(hidden_NH, axis=0)
        setattr(self.trunk_owner, self.trunk_name, Replay(trunk, padded[None]))
        try:
            logits: mx.array = self.base(mx.zeros((1, padded.shape[0]), mx.int32))
        finally:
            setattr(self.trunk_owner, self.trunk_name, trunk)
        return logits[0, : hidden_NH.shape[0]]

    def make_cache(self) -> list[Any]:
        """An empty cache for one row in mlx-lm's own classes; `PlainCache` for keys and values of models whose rows can
        be batched, or that keep states."""
        cache: list[Any] = make_prompt_cache(self.base)
        if not (self.is_batch_invariant or self.has_states):
            return cache
        return mirrored(cache, lambda leaf: leaf if isinstance(leaf, ArraysCache) else PlainCache())

    def own_lora(self, arrays: Mapping[str, mx.array]) -> Mapping[str, mx.array]:
        """The arrays of an adapter, or this process's part of them."""
        return arrays if self.parallel is None else self.parallel.own_lora(arrays)

    @property
    def num_layers(self) -> int:
        return len(self.base.layers)

    @property
    def base_bytes(self) -> int:
        return sum(array.nbytes for _, array in tree_flatten(self.base.parameters()))


def can_batch(base: nn.Module, model_type: str) -> bool:
    """Whether rows of different lengths give the same numbers together as alone.

    True for models whose layers all keep plain keys and values. Recurrent states and mlx-lm's other caches are not
    indexed by position, and a few models read the offset as one Python number: these run one row at a time.
    """
    layers = make_prompt_cache(base)  # an encoder has none
    plain = all(type(layer) in (KVCache, RotatingKVCache) for layer in layers)
    return bool(layers) and plain and model_type not in ONE_ROW_MODELS


def keeps_states(base: nn.Module, model_type: str) -> bool:
    """Whether the layers of a model keep states, of any kind, and all else that they keep is plain keys and values.

    Whether rows with such states can share a step is tried by the engine, see `engine/state_trial.py`.
    """
    kinds = {type(leaf) for leaf in leaves(make_prompt_cache(base))}
    return (
        ArraysCache in kinds and kinds <= {ArraysCache, KVCache, RotatingKVCache} and model_type not in ONE_ROW_MODELS
    )


def leaves(caches: Iterable[Any]) -> Iterable[Any]:
    """The caches of all layers, and each of those in mlx-lm's lists of caches."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def mirrored(caches: Iterable[Any], replace: Callable[[Any], Any]) -> list[Any]:
    """`caches` with another one in the place of each of their leaves."""
    return [CacheList(*mirrored(one.caches, replace)) if isinstance(one, CacheList) else replace(one) for one in caches]


ONE_ROW_MODELS = frozenset({"gpt_bigcode", "afm7", "longcat_flash_ngram", "llama4", "gemma2", "gemma3n", "phi3small"})
"""Model types of mlx-lm that use plain caches and still need one common offset (gpt_bigcode, llama4), take no mask per
row (gemma2 and phi3small, whose grouped scores have five axes), read another layer's cache (gemma3n), or differ when
batched."""
