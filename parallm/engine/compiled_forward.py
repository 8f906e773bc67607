"""A decode step's forward through `mx.compile`: Python builds the graph once per shape and not for every token.

Building the graph of hundreds of modules takes Python longer than a GPU needs to compute it. What differs from step to
step comes in as arrays: tokens, lengths, slots, pools, the adapter's factors. A trace is made for each number of rows
(see `row_bucket`), shape of the pools and structure of the adapter; MLX keeps all of them.

Axes: B rows, H hidden.
"""

from collections.abc import Callable

import mlx.core as mx

from parallm.engine.kv.attention_metadata import AttentionMetadata
from parallm.engine.kv.cache import SlotCache
from parallm.engine.kv.cost import KvFormat
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
        mx.eval(model.base.parameters())  # a trace would repeat what makes an array that is not evaluated yet
        self._model = model
        self._functions: dict[tuple[Structure | None, bool], Function] = {}
        self._needs_places = False  # as a trace has found for all rows, see `AttentionMetadata`
        self._lora: SingleLora | SegmentedLora | None = None  # the last one, its arrays and structure
        self._arrays: Arrays = []
        self._structure: Structure | None = None

    def __call__(
        self, tokens_B: mx.array, rows: AttentionMetadata, pools: Arrays, lora: SingleLora | SegmentedLora | None
    ) -> tuple[mx.array, Arrays]:
        """Hidden states (B, H) and the pools after the step: keys and values (S, heads, L, D) of each layer in turn."""
        if lora is not self._lora:
            self._lora = lora
            self._arrays, self._structure = ([], None) if lora is None else (lora.arrays(), lora.structure())
        key = self._structure, rows.by_place
        if key not in self._functions:
            self._functions[key] = self._compile(*key)
        hidden_BH, pools = self._functions[key](tokens_B, rows.lengths_B, rows.slots_B, pools, self._arrays)
        rows.needs_places = rows.needs_places or self._needs_places
        return hidden_BH, pools

    def _compile(self, structure: Structure | None, by_place: bool) -> Function:

        def forward(
            tokens_B: mx.array, lengths_B: mx.array, slots_B: mx.array, pools: Arrays, weights: Arrays
        ) -> tuple[mx.array, Arrays]:
            traced = AttentionMetadata()
            traced.by_place = traced.needs_places = by_place
            traced.set_traced(lengths_B, slots_B, num_positions=pools[0].shape[2])
            pairs = zip(pools[::2], pools[1::2], strict=True)
            caches = [SlotCache(traced, KvFormat(), pair) for pair in pairs]
            lora = None if structure is None else structure.lora(weights)
            hidden_B1H = self._model.hidden(tokens_B[:, None], caches, lora)
            self._needs_places = self._needs_places or traced.needs_places
            return hidden_B1H[:, 0], [array for cache in caches for array in cache.state]

        compiled: Function = mx.compile(forward)
        return compiled
