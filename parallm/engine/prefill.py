"""Computes prompts in chunks, each alone with a plain causal mask, and what preempted rows had, as it was computed.

What the prefix cache knows of a prompt's beginning is not computed again. Only rows that batch have one: recurrent
states cannot be cut.

Axes: T tokens, H hidden, V vocabulary.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from functools import partial
from typing import Any

import mlx.core as mx

from parallm.engine.decoder import Decoder
from parallm.engine.kv_cost import BLOCK, blocks
from parallm.engine.kv_memory import KvMemory
from parallm.engine.prefix_cache import Hit, Owner
from parallm.engine.sequence import Prompt, Sequence
from parallm.engine.settings import EngineSettings
from parallm.engine.views import AdapterViews
from parallm.model.attention import LEAST_ROWS
from parallm.model.shared_model import SharedModel


class Prefill:
    def __init__(
        self,
        model: SharedModel,
        views: AdapterViews,
        memory: KvMemory,
        settings: EngineSettings,
        *,
        is_known: Callable[[str, int], bool],
        room: Callable[[], int],
    ) -> None:
        """`is_known`: whether an adapter of this name and version can still be asked for; `room`: bytes to take."""
        self.num_prompt_tokens = 0
        """Of all prompts that were begun, those known from before included."""
        self.num_cached_tokens = 0
        """Of these, those whose keys and values were known."""
        self._model = model
        self._views = views
        self._memory = memory
        self._chunk = settings.prefill_chunk
        self._is_known = is_known
        self._room = room
        self._reuses = settings.prefix_cache and model.batches_exactly

    def compute_chunk(self, prompt: Prompt) -> list[mx.array]:
        """Compute the next chunk of a prompt; what is to be evaluated."""
        if prompt.num_computed == 0:
            prompt.cache = self._model.make_cache()
            self._begin(prompt)
        segment_end, adapter = prompt.segment()
        chunk = prompt.tokens[prompt.num_computed : self._end(prompt.num_computed, segment_end)]
        # A row behind the chunk is seen by nobody, and makes products of enough rows for exact numbers
        spare = max(0, LEAST_ROWS - len(chunk)) if self._model.batches_exactly else 0
        tokens_1T = mx.array([[*chunk, *chunk[-1:] * spare]], mx.int32)
        hidden_1TH = self._model.hidden(tokens_1T, prompt.cache, self._views.for_rows([adapter]))
        if spare:
            for layer in prompt.cache:
                layer.trim(spare)
        computed: list[mx.array] = []
        if prompt.scores is not None:
            behind = prompt.tokens[prompt.num_computed + 1 : prompt.num_computed + len(chunk) + 1]
            computed += prompt.scores.add(self._model, hidden_1TH[0], behind)
        prompt.num_computed += len(chunk)
        computed += [array for layer in prompt.cache for array in _arrays(layer.state)]
        if prompt.num_computed == len(prompt.tokens):
            last = len(chunk) - 1
            prompt.logits_V = self._model.head(hidden_1TH[0, last : last + 1])[0]
            computed += [prompt.logits_V, *self._keep(prompt.waiting[0], len(prompt.tokens), _copier(prompt.cache))]
        return computed

    def keep_ended(self, decoder: Decoder) -> list[mx.array]:
        """Keep what rows that have ended have computed; what is to be evaluated before their slots change."""
        kept: list[mx.array] = []
        for place, row in enumerate(decoder.rows):
            if row.finish_reason is not None and row.request.is_continued:
                num_computed = len(row.request.prompt_tokens) + len(row.tokens) - 1
                kept += self._keep(row, num_computed, partial(decoder.shard.copies, place))
        return kept

    def _keep(self, row: Sequence, num_computed: int, copies: Callable[[int, int], list[mx.array]]) -> list[mx.array]:
        if not self._reuses:
            return []
        prefixes = self._memory.prefixes
        prefixes.forget(self._is_known)
        end, adapter = row.segments()[0]  # what one version has computed
        tokens = (*row.request.prompt_tokens, *row.tokens)[: min(end, num_computed)]
        owner = Owner.of(adapter, row.request.cache_salt)
        return prefixes.add(owner, tokens, copies, self._memory.cost.per_token, self._room())

    def _begin(self, prompt: Prompt) -> None:
        """Allocate for the whole prompt, where mlx-lm's caches would grow and copy, and fill in what is known of it."""
        self.num_prompt_tokens += len(prompt.tokens)
        if not self._model.batches_exactly:
            return
        size = blocks(prompt.num_allocated) * BLOCK
        for layer in prompt.cache:
            layer.step = size
        hit = self._hit(prompt) if self._reuses and prompt.scores is None else None
        if hit is None:
            return
        arrays = hit.arrays()
        for layer, keys_1HTD, values_1HTD in zip(prompt.cache, arrays[::2], arrays[1::2], strict=True):
            padding = [(0, 0), (0, 0), (0, size - hit.num_tokens), (0, 0)]
            layer.keys, layer.values = mx.pad(keys_1HTD, padding), mx.pad(values_1HTD, padding)
            layer.offset = hit.num_tokens
        prompt.num_computed = hit.num_tokens
        self.num_cached_tokens += hit.num_tokens
        for member in prompt.waiting:
            member.reuses(hit.num_tokens)

    def _hit(self, prompt: Prompt) -> Hit | None:
        end, adapter = prompt.segment()
        most = min(end, len(prompt.tokens) - LEAST_ROWS)  # something must give logits, in products of enough rows
        return self._memory.prefixes.match(Owner.of(adapter, prompt.request.cache_salt), prompt.tokens, most)

    def _end(self, start: int, segment_end: int) -> int:
        """A chunk's end, a little earlier where the rest would be too few rows for exact products."""
        end = min(start + self._chunk, segment_end)
        return end - (LEAST_ROWS if 0 < segment_end - end < LEAST_ROWS else 0)


def _copier(cache: Ordered[Any]) -> Callable[[int, int], list[mx.array]]:
    def copies(start: int, end: int) -> list[mx.array]:
        parts = [array[:, :, start:end] for layer in cache for array in (layer.keys, layer.values)]
        return [mx.contiguous(part) for part in parts]

    return copies


def _arrays(state: object) -> list[mx.array]:
    if isinstance(state, mx.array):
        return [state]
    if isinstance(state, list | tuple):
        return [array for part in state for array in _arrays(part)]
    return []
