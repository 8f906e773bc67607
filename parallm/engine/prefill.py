"""Computes prompts in chunks, each alone with a plain causal mask, and what preempted rows had, as it was computed.

Axes: T tokens, H hidden, V vocabulary.
"""

import mlx.core as mx

from parallm.engine.kv_cost import BLOCK, blocks
from parallm.engine.sequence import Prompt
from parallm.engine.views import AdapterViews
from parallm.model.attention import LEAST_ROWS
from parallm.model.shared_model import SharedModel


class Prefill:
    def __init__(self, model: SharedModel, views: AdapterViews, chunk: int) -> None:
        self._model = model
        self._views = views
        self._chunk = chunk

    def compute_chunk(self, prompt: Prompt) -> list[mx.array]:
        """Compute the next chunk of a prompt; what is to be evaluated."""
        if prompt.num_computed == 0:
            prompt.cache = self._model.make_cache()
            self._allocate(prompt)
        segment_end, adapter = prompt.segment()
        chunk = prompt.tokens[prompt.num_computed : self._end(prompt.num_computed, segment_end)]
        # A row behind the chunk is seen by nobody, and makes products of enough rows for exact numbers
        spare = max(0, LEAST_ROWS - len(chunk)) if self._model.batches_exactly else 0
        tokens_1T = mx.array([[*chunk, *chunk[-1:] * spare]], mx.int32)
        hidden_1TH = self._model.hidden(tokens_1T, prompt.cache, self._views.for_rows([adapter]))
        if spare:
            for layer in prompt.cache:
                layer.trim(spare)
        prompt.num_computed += len(chunk)
        computed = [array for layer in prompt.cache for array in _arrays(layer.state)]
        if prompt.num_computed == len(prompt.tokens):
            last = len(chunk) - 1
            prompt.logits_V = self._model.head(hidden_1TH[0, last : last + 1])[0]
            computed.append(prompt.logits_V)
        return computed

    def _allocate(self, prompt: Prompt) -> None:
        """Let the first chunk allocate for the whole prompt, where mlx-lm's caches would grow and copy."""
        if self._model.batches_exactly:
            for layer in prompt.cache:
                layer.step = blocks(prompt.num_allocated) * BLOCK

    def _end(self, start: int, segment_end: int) -> int:
        """A chunk's end, a little earlier where the rest would be too few rows for exact products."""
        end = min(start + self._chunk, segment_end)
        return end - (LEAST_ROWS if 0 < segment_end - end < LEAST_ROWS else 0)


def _arrays(state: object) -> list[mx.array]:
    if isinstance(state, mx.array):
        return [state]
    if isinstance(state, list | tuple):
        return [array for part in state for array in _arrays(part)]
    return []
