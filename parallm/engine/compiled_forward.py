"""A decode step's forward through `mx.compile`: Python builds the graph once per shape and not for every token.

Building the graph of hundreds of modules takes Python longer than a GPU needs to compute it. What differs from step to
step comes in as arrays: tokens, lengths, slots, KV buffers, LoRA weights. There is a trace for each number of rows (see
`row_bucket`), shape of the buffers and structure of the LoRA; MLX keeps all of them.

Axes: B rows, H hidden.
"""

from collections.abc import Callable

import mlx.core as mx

from parallm.engine.kv.attention_metadata import AttentionMetadata
from parallm.engine.kv.cache import SlotCache
from parallm.model.lora.segmented import SegmentedLora, SegmentedStructure
from parallm.model.lora.single import SingleLora, SingleStructure
from parallm.model.shared_model import SharedModel

Structure = SingleStructure | SegmentedStructure
Arrays = list[mx.array]
Function = Callable[[mx.array, mx.array, mx.array, Arrays, Arrays], tuple[mx.array, Arrays]]


def row_bucket(num_rows: int) -> int:
    """The number of rows that are computed for `num_rows`: at most a third more from 12 on.

    A single row has a bucket of its own: MLX multiplies a vector by a kernel that costs the host a quarter of a matrix
    product.
    """
    if num_rows <= 1:
        return num_rows
    step = next((step for most, step in ((8, 4), (32, 8), (64, 16)) if num_rows <= most), 32)
    return max(1, -(-num_rows // step)) * step


class CompiledForward:
    """The trunk of a model over slot caches, for rows whose adapters come as arrays alone."""

    def __init__(self, model: SharedModel) -> None:
        mx.eval(model.base.parameters())  # a trace would repeat the computation of an array that is not evaluated yet
        self._model = model
        self._functions: dict[tuple[Structure | None, bool], Function] = {}
        self._needs_contiguous = False  # as a trace has found for all rows, see `AttentionMetadata`
        self._lora: SingleLora | SegmentedLora | None = None  # the last one, with its arrays and structure
        self._arrays: Arrays = []
        self._structure: Structure | None = None

    def __call__(
        self, tokens_B: mx.array, metadata: AttentionMetadata, buffers: Arrays, lora: SingleLora | SegmentedLora | None
    ) -> tuple[mx.array, Arrays]:
        """Hidden states (B, H) and the KV buffers after the step, (S, heads, L, D) of each layer in turn."""
        if lora is not self._lora:
            self._lora = lora
            self._arrays, self._structure = ([], None) if lora is None else (lora.arrays(), lora.structure())
        key = self._structure, metadata.is_contiguous
        if key not in self._functions:
            self._functions[key] = self._compile(*key)
        function = self._functions[key]
        hidden_BH, buffers = function(tokens_B, metadata.lengths_B, metadata.slots_B, buffers, self._arrays)
        metadata.needs_contiguous = metadata.needs_contiguous or self._needs_contiguous
        return hidden_BH, buffers

    def _compile(self, structure: Structure | None, is_contiguous: bool) -> Function:

        def forward(
            tokens_B: mx.array, lengths_B: mx.array, slots_B: mx.array, buffers: Arrays, weights: Arrays
        ) -> tuple[mx.array, Arrays]:
            traced = AttentionMetadata()
            traced.is_contiguous = traced.needs_contiguous = is_contiguous
            traced.set_traced(lengths_B, slots_B, num_positions=buffers[0].shape[2])
            caches = [SlotCache(traced, pair) for pair in zip(buffers[::2], buffers[1::2], strict=True)]
            lora = None if structure is None else structure.lora(weights)
            hidden_B1H = self._model.hidden(tokens_B[:, None], caches, lora)
            self._needs_contiguous = self._needs_contiguous or traced.needs_contiguous
            return hidden_B1H[:, 0], [array for cache in caches for array in cache.state]

        compiled: Function = mx.compile(forward)
        return compiled
