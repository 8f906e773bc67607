"""Computes prompts in chunks, each alone with a plain causal mask, and what preempted rows had, as it was computed.

On CUDA, prompts that begin at the same position are computed together, each in a row of one forward: a forward takes
Python milliseconds, whatever is in it. Behind the end of a shorter one come tokens that it does not see and nobody
reads (`prompt_shapes.py`). On a CPU nothing would be gained, and a prompt's numbers could depend on its company.

What the prefix cache knows of a prompt's beginning is not computed again. Only rows that batch have one: recurrent
states cannot be cut.

Axes: B prompts, T tokens, H hidden, V vocabulary.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from functools import partial
from typing import Any

import mlx.core as mx

from parallm.device.streams import DeviceStreams
from parallm.engine.decode import Decoder
from parallm.engine.kv.budget import KvBudget
from parallm.engine.kv.cost import BLOCK, blocks
from parallm.engine.kv.prefix_cache import Hit, Owner, layers_of, row_copies, stacks_of
from parallm.engine.kv.shapes import allocated, padded, reusable
from parallm.engine.sequence import PrefillJob, Sequence
from parallm.engine.settings import EngineSettings
from parallm.model.attention import MIN_ROWS
from parallm.model.kernels.cuda import on_cuda
from parallm.model.lora.selector import LoraSelector
from parallm.model.shared_model import SharedModel

CHUNK, CUDA_CHUNK = 512, 2048
"""Tokens of a chunk where the settings leave it open: a GPU is full with the larger one."""
MIN_FILLED = 0.5
"""Of a row: shorter prompts are computed with others."""


class Prefill:
    def __init__(
        self,
        model: SharedModel,
        streams: DeviceStreams,
        loras: LoraSelector,
        memory: KvBudget,
        settings: EngineSettings,
        is_known: Callable[[str, int], bool],
        room: Callable[[], int],
    ) -> None:
        """`is_known`: whether an adapter of this name and version can still be asked for; `room`: bytes to take."""
        self.num_prompt_tokens = 0
        """Of all prompts that were begun, those known from before included."""
        self.num_cached_tokens = 0
        """Of these, those whose keys and values were known."""
        self._model = model
        self._streams = streams
        self._loras = loras
        self._memory = memory
        self._chunk = settings.prefill_chunk or (CUDA_CHUNK if on_cuda() else CHUNK)
        self._is_known = is_known
        self._room = room
        self._reuses = settings.prefix_cache and model.is_batch_invariant
        self.positions_together = self._chunk if model.is_batch_invariant and on_cuda() else 0
        """That one forward computes of several prompts; 0: each prompt is computed alone."""

    @property
    def most_prompts(self) -> int:
        """That one unit may compute: one per lane, or as many as one forward takes."""
        return self.positions_together // MIN_ROWS or self._streams.width

    def compute(self, prompts: Ordered[PrefillJob]) -> list[list[mx.array]]:
        """Compute what `for_one_unit` chose: prompts together to their ends, or a chunk of each; see there."""
        if self.positions_together and len(prompts) > 1:
            return [self.compute_together(prompts)]
        return self._streams.run(self.compute_chunk, prompts)

    def for_one_unit(self, prompts: list[PrefillJob]) -> list[PrefillJob]:
        """All prompts where each is computed alone; else the first, and those behind it that fit its forward."""
        if not self.positions_together:
            return prompts
        first = prompts[0]
        known = self._num_known(first)
        if known is None:
            return [first]
        chosen, longest = [first], len(first.tokens) - known
        for prompt in prompts[1:]:
            if padded(longest) * (len(chosen) + 1) > self.positions_together:
                break
            length = len(prompt.tokens) - known
            most, least = max(longest, length), min(longest, length)
            fits = padded(most) * (len(chosen) + 1) <= self.positions_together and least >= MIN_FILLED * most
            if fits and prompt.segment()[1] is first.segment()[1] and self._num_known(prompt) == known:
                chosen.append(prompt)
                longest = most
        return chosen

    def compute_together(self, prompts: Ordered[PrefillJob]) -> list[mx.array]:
        """Compute prompts to their ends in one forward; what is to be evaluated."""
        cache, hits, known = self._model.make_cache(), [self._hit(prompt) for prompt in prompts], 0
        for place, (prompt, hit) in enumerate(zip(prompts, hits, strict=True)):
            prompt.cache, prompt.cache_row, known = cache, place, hit.num_tokens if hit else 0
            self._count(prompt, known)
        rests = [prompt.tokens[known:] for prompt in prompts]
        longest = padded(max(map(len, rests)))
        _allocate(cache, allocated(known + longest), [hit for hit in hits if hit])
        tokens_BT = [[*rest, *rest[-1:] * (longest - len(rest))] for rest in rests]
        lora = self._loras.select([prompts[0].segment()[1]] * len(prompts))
        hidden_BTH = self._model.hidden(mx.array(tokens_BT, mx.int32), cache, lora)
        last_B = mx.array([len(rest) - 1 for rest in rests])
        logits_BV = self._model.head(hidden_BTH[mx.arange(len(prompts)), last_B])
        computed = [logits_BV, *_states(cache)]
        stacks = stacks_of([array for layer in cache for array in (layer.keys, layer.values)])
        for prompt in prompts:
            prompt.num_computed, prompt.logits_V = len(prompt.tokens), logits_BV[prompt.cache_row]
            computed += self._keep(prompt.waiting[0], len(prompt.tokens), partial(_copies, stacks, prompt.cache_row))
        return computed

    def compute_chunk(self, prompt: PrefillJob) -> list[mx.array]:
        """Compute the next chunk of a prompt; what is to be evaluated."""
        if prompt.num_computed == 0:
            prompt.cache = self._model.make_cache()
            self._begin(prompt)
        segment_end, adapter = prompt.segment()
        chunk = prompt.tokens[prompt.num_computed : self._end(prompt.num_computed, segment_end)]
        # Tokens behind the chunk are seen by nobody, and make products of the right sizes
        most = prompt.num_allocated - prompt.num_computed
        spare = min(padded(len(chunk)), most) - len(chunk) if self._model.is_batch_invariant else 0
        tokens_1T = mx.array([[*chunk, *chunk[-1:] * spare]], mx.int32)
        hidden_1TH = self._model.hidden(tokens_1T, prompt.cache, self._loras.select([adapter]))
        if spare:
            for layer in prompt.cache:
                layer.trim(spare)
        computed: list[mx.array] = []
        if prompt.scores is not None:
            behind = prompt.tokens[prompt.num_computed + 1 : prompt.num_computed + len(chunk) + 1]
            computed += prompt.scores.add(self._model, hidden_1TH[0], behind)
        prompt.num_computed += len(chunk)
        computed += _states(prompt.cache)
        if prompt.num_computed == len(prompt.tokens):
            last = len(chunk) - 1
            prompt.logits_V = self._model.head(hidden_1TH[0, last : last + 1])[0]
            computed += [
                prompt.logits_V,
                *self._keep(prompt.waiting[0], len(prompt.tokens), partial(_first_copies, prompt.cache)),
            ]
        return computed

    def keep_ended(self, decoder: Decoder) -> list[mx.array]:
        """Keep what rows that have ended have computed; what is to be evaluated before their slots change."""
        kept: list[mx.array] = []
        for place, row in enumerate(decoder.rows):
            if row.finish_reason is not None and row.request.is_continued and not row.is_broken:
                num_computed = len(row.request.prompt_tokens) + len(row.tokens) - 1
                kept += self._keep(row, num_computed, partial(decoder.batch.copies, place))
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

    def _begin(self, prompt: PrefillJob) -> None:
        """Allocate for the whole prompt, where mlx-lm's caches would grow and copy, and fill in what is known of it."""
        hit = self._hit(prompt)
        self._count(prompt, hit.num_tokens if hit else 0)
        if self._model.is_batch_invariant:
            _allocate(prompt.cache, prompt.num_allocated, [hit] if hit else [])

    def _count(self, prompt: PrefillJob, num_known: int) -> None:
        self.num_prompt_tokens += len(prompt.tokens)
        self.num_cached_tokens += num_known
        prompt.num_computed = num_known
        if num_known:
            for member in prompt.waiting:
                member.reuses(num_known)

    def _hit(self, prompt: PrefillJob) -> Hit | None:
        """What is known of a prompt that begins."""
        if not self._reuses or prompt.scores is not None:
            return None
        return self._memory.prefixes.match(*self._beginning(prompt))

    def _beginning(self, prompt: PrefillJob) -> tuple[Owner, Ordered[int], int]:
        """Whose tokens they are, and how many of them are known and taken as such."""
        end, adapter = prompt.segment()
        most = min(end, len(prompt.tokens) - MIN_ROWS)  # something must give logits, in products of enough rows
        owner = Owner.of(adapter, prompt.request.cache_salt)
        return owner, prompt.tokens, reusable(self._memory.prefixes.num_known(owner, prompt.tokens, most))

    def _num_known(self, prompt: PrefillJob) -> int | None:
        """Tokens that are known of a prompt that one forward can compute with others; None: it is computed alone."""
        if prompt.num_computed or prompt.scores is not None or prompt.segment()[0] < len(prompt.tokens):
            return None
        known = self._beginning(prompt)[2] if self._reuses else 0
        return known if len(prompt.tokens) - known <= self.positions_together else None

    def _end(self, start: int, segment_end: int) -> int:
        """A chunk's end, a little earlier where the rest would be too few rows for exact products."""
        end = min(start + self._chunk, segment_end)
        return end - (MIN_ROWS if 0 < segment_end - end < MIN_ROWS else 0)


def _allocate(cache: Ordered[Any], num_positions: int, hits: Ordered[Hit]) -> None:
    """Let caches have so many positions from the beginning; `hits`, one for each row, are the first of them, if any."""
    size = blocks(num_positions) * BLOCK
    for layer in cache:
        layer.step = size
    if not hits:
        return
    num_known = hits[0].num_tokens
    padding = [(0, 0), (0, 0), (0, size - num_known), (0, 0)]
    arrays = layers_of([hit.arrays() for hit in hits])
    for layer, keys_BHTD, values_BHTD in zip(cache, arrays[::2], arrays[1::2], strict=True):
        layer.keys, layer.values = mx.pad(keys_BHTD, padding), mx.pad(values_BHTD, padding)
        layer.offset = num_known


def _first_copies(cache: Ordered[Any], start: int, end: int) -> list[mx.array]:
    """Of the only row of a cache."""
    return row_copies([array[:, :, start:end] for layer in cache for array in (layer.keys, layer.values)])


def _copies(stacks_NBHTD: Ordered[mx.array], place: int, start: int, end: int) -> list[mx.array]:
    """Of one of several rows."""
    return [mx.contiguous(stack[:, place, :, start:end]) for stack in stacks_NBHTD]


def _states(cache: Ordered[Any]) -> list[mx.array]:
    return [array for layer in cache for array in _arrays(layer.state)]


def _arrays(state: object) -> list[mx.array]:
    if isinstance(state, mx.array):
        return [state]
    if isinstance(state, list | tuple):
        return [array for part in state for array in _arrays(part)]
    return []
