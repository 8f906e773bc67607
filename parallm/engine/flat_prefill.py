"""Computes prompts of any lengths as one flat row of tokens, into pages; CUDA only.

A unit takes a number of tokens and not of prompts: short prompts lie one after the other, and a long one is cut into
chunks, as in SARATHI (https://arxiv.org/abs/2308.16369). Linear layers, norms and rotary embeddings see every token as
a row. A layer attends in one launch, reads earlier chunks and cached prefixes in the pages where they are, and writes
its keys and values there. Where nothing else is read, the last MLP takes only the last tokens of prompts. Units of one
size are padded to one shape, so MLX finds buffers and CUDA graphs of earlier units. Each token attends in the same
order whatever lies beside it.

Axes: M tokens of a unit, S prompts that end in it, C places for their last tokens, N pages of all prompts, P pages of a
pool, T positions of a page, Q query heads, H key-value heads, D head size, V vocabulary.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from parallm.device.memory import device_memory
from parallm.engine.decode_batch import Structure
from parallm.engine.decoder import Decoder
from parallm.engine.kv.shapes import STEP, padded
from parallm.engine.paged_batch import PagedDecodeBatch
from parallm.engine.paged_memory import PagedMemory
from parallm.engine.sequence import PrefillJob
from parallm.engine.settings import EngineSettings
from parallm.model.adapters.adapter import Adapter
from parallm.model.kernels.cuda import has_kernels, listed_kernels, on_cuda, uploaded
from parallm.model.kernels.decode_attention import RotaryAngles
from parallm.model.kernels.flash_attention import MAX_CHUNKS, attend_pages, fits_pages, page_tiles
from parallm.model.kernels.gather import take_rows
from parallm.model.kernels.page_write import PAGE, write_pages
from parallm.model.kernels.rotary import Rotation
from parallm.model.layers import can_trim, trimmed_last_layer
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.segmented import SegmentedLora
from parallm.model.lora.selector import MAX_FLAT, LoraSelector
from parallm.model.lora.single import SingleLora
from parallm.model.patches.forward import OwnCache
from parallm.model.patches.kernel_trial import try_flash_attention
from parallm.model.patches.rotary import before_rotation
from parallm.model.shared_model import SharedModel

CHUNK, LARGE_CHUNK = 2048, 8192
"""Default tokens of a unit, and with `LARGE_MEMORY` bytes on the device. A GPU is full with the smaller one; running
answers wait for a unit, though, and take a step after each, which costs as much for few of them as for many."""
LARGE_MEMORY = 70e9
TRIMMED_FROM = 512
"""Tokens of a unit; in one of fewer the last layer takes as long for a few of them as for all."""
MIN_PAGES = 256
"""Pages of all prompts of a unit that count as one number of them."""

Arrays = list[mx.array]
Function = Callable[[mx.array, Arrays, Arrays, Arrays, Arrays], mx.array]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions `start` to `end` of a sequence that has these pages."""

    start: int
    end: int
    pages: Ordered[int]

    @property
    def size(self) -> int:
        return self.end - self.start


Plan = list[tuple[PrefillJob, Chunk]]
"""The jobs of a unit, and their tokens."""
HeadShape = tuple[int, int]
"""Query heads of each of a layer's key heads, and their size."""


class FlatLayout:
    """Places of a unit's tokens, for all layers."""

    def __init__(self, arrays: Ordered[mx.array], shapes: Ordered[HeadShape]) -> None:
        """`arrays` are int32, as `lay_out` makes them for layers of these shapes."""
        self.positions_M, self.slots_M, self.pages_N, *tiles = arrays
        self._tiles = dict(zip(shapes, tiles, strict=False))
        self._rotary: dict[Rotation, RotaryAngles] = {}

    def tiles(self, shape: HeadShape) -> mx.array:
        """The tiles of queries and keys of a layer's blocks; see `page_tiles`."""
        return self._tiles[shape]

    def rotary(self, rotation: Rotation) -> RotaryAngles:
        if rotation not in self._rotary:
            angles = rotation.angles(self.positions_M)
            self._rotary[rotation] = RotaryAngles(angles=angles, traditional=rotation.traditional)
        return self._rotary[rotation]


def lay_out(chunks: Ordered[Chunk], num_tokens: int, shapes: Ordered[HeadShape]) -> list[mx.array]:
    """Positions and slots of the tokens of chunks one after the other, the pages of all, and tiles for each shape.

    Padding fills the unit up to `num_tokens`: it writes to the scratch page 0, and sees nothing. Few numbers of tokens
    and pages give few shapes.
    """
    num_padding = num_tokens - sum(chunk.size for chunk in chunks)
    positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
    slots = [
        np.asarray(chunk.pages)[own // PAGE] * PAGE + own % PAGE for chunk, own in zip(chunks, positions, strict=True)
    ]
    firsts = list(accumulate((len(chunk.pages) for chunk in chunks), initial=0))
    num_pages = max(MIN_PAGES, 1 << (firsts[-1] - 1).bit_length())
    pages = [np.asarray(chunk.pages) for chunk in chunks]
    described = [(chunk.size, chunk.start, first) for chunk, first in zip(chunks, firsts, strict=False)]
    return [
        _int32(*positions, np.zeros(num_padding)),
        _int32(*slots, np.arange(num_padding) % PAGE),
        _int32(*pages, np.zeros(num_pages - firsts[-1])),
        *(_int32(page_tiles(described, num_tokens, *shape)) for shape in shapes),
    ]


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A mask: a token sees itself and the `size` - 1 tokens before it."""

    size: int


class FlatLayer(OwnCache):
    """The cache of a layer in a flat forward."""

    def __init__(self, layout: FlatLayout, keys_PHTD: mx.array, values_PHTD: mx.array) -> None:
        self.has_attended = False
        self._layout = layout
        self._pages = keys_PHTD, values_PHTD
        self._new: tuple[mx.array, ...] = ()

    @property
    def offset(self) -> mx.array:
        """Position of each token, (M,): what rotary embeddings need."""
        return self._layout.positions_M

    def make_mask(self, _: int, return_array: bool = False, window_size: int | None = None) -> SlidingWindow | None:
        assert not return_array, "a model that computes with masks cannot be flat"
        return None if window_size is None else SlidingWindow(window_size)

    def update_and_fetch(self, keys_MH1D: mx.array, values_MH1D: mx.array) -> tuple[mx.array, mx.array]:
        """The same arrays: `attend` writes them into pages."""
        self._new = keys_MH1D, values_MH1D
        return keys_MH1D, values_MH1D

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """Queries (M, Q, 1, D), keys and values (M, H, 1, D) -> (M, Q, 1, D)."""
        own = self._new and self._new[0] is keys and self._new[1] is values
        assert own, "a layer attends once, to keys and values of its own"
        self._new = ()
        window = mask.size if isinstance(mask, SlidingWindow) else None
        layout, (keys_PHTD, values_PHTD) = self._layout, self._pages
        tiles = layout.tiles((queries.shape[1] // keys.shape[1], queries.shape[3]))
        assert fits_pages(queries, keys_PHTD, values_PHTD), "the kernels do not take this layer"
        self.has_attended = True
        queries, keys, rotation = before_rotation(queries, keys, self.offset, keys_PHTD.dtype)
        rotary = None if rotation is None else layout.rotary(rotation)
        queries_MQD = write_pages([queries, keys, values], keys_PHTD, values_PHTD, layout.slots_M, rotary)
        attended_MQD = attend_pages(
            queries_MQD, keys_PHTD, values_PHTD, layout.pages_N, tiles, scale=scale, window=window, sinks_Q=sinks
        )
        return attended_MQD[:, :, None]


class OwnToken(OwnCache):
    """The cache of layers in which every token, a row of its own, sees itself alone: attention gives its values, which
    sinks would make smaller."""

    offset = 0

    def make_mask(self, *_: Any, **__: Any) -> None: ...

    def update_and_fetch(self, keys_MH1D: mx.array, values_MH1D: mx.array) -> tuple[mx.array, mx.array]:
        return keys_MH1D, values_MH1D

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, **_: Any) -> mx.array:
        """Values (M, H, 1, D) for queries (M, Q, 1, D) -> (M, Q, 1, D)."""
        return mx.repeat(values, queries.shape[1] // values.shape[1], axis=1)


@dataclass(frozen=True, slots=True)
class Read:
    """The tokens of a unit that are read, int32 (C,), and their LoRA."""

    places_C: mx.array
    lora: LoraBinding | None

    @classmethod
    def of(cls, arrays: Arrays, lora: LoraBinding | None) -> "Read":
        """Return what has given these `arrays()`, for a unit with `lora`."""
        places_C, *rows = arrays
        return cls(places_C, lora.of_rows(rows) if isinstance(lora, SegmentedLora) else lora)

    def arrays(self) -> Arrays:
        """Return the arrays that are others in each unit: places, int32 (C,), and those of the LoRA's rows."""
        return [self.places_C, *(self.lora.rows() if isinstance(self.lora, SegmentedLora) else [])]


class FlatForward:
    """The trunk of a model over flat rows. It is compiled, as Python takes longer to build the graph of a short prompt
    than a GPU to compute it: MLX keeps a trace for each number of tokens and structure of the LoRA."""

    def __init__(self, model: SharedModel, shapes: Ordered[HeadShape]) -> None:
        mx.eval(model.base.parameters())  # a trace would repeat the computation of an array that is not evaluated yet
        self._model = model
        self._shapes = shapes
        self.can_trim = model.parallel is None and can_trim(model, self._own_hidden)  # divided ones were not tried
        self._is_compiled = on_cuda()
        self._functions: dict[Structure | None, Function] = {}

    def __call__(
        self,
        tokens_M: mx.array,
        arrays: Arrays,
        pools: Arrays,
        lora: LoraBinding | None,
        read: Read | None = None,
    ) -> mx.array:
        """Hidden states (M, hidden), not evaluated, or of the tokens that are read (C, hidden) if the model `can_trim`;
        `arrays` are those of `lay_out`, `pools` keys and values of each layer in turn."""
        if self._is_compiled and (lora is None or isinstance(lora, SingleLora | SegmentedLora)):
            structure, weights = (None, []) if lora is None else (lora.structure(), lora.arrays())
            if structure not in self._functions:
                self._functions[structure] = self._compile(structure)
            try:
                return self._functions[structure](tokens_M, arrays, pools, weights, read.arrays() if read else [])
            except ValueError as error:  # MLX's, for a model that reads an array while it runs, such as dbrx
                logger.warning("prompts are not compiled: %s", error)
                self._is_compiled = False
        return self._hidden(tokens_M, arrays, pools, lora, read)

    def _own_hidden(self, tokens_M: mx.array) -> mx.array:
        """Hidden states (M, hidden) of tokens of which each sees itself alone."""
        return self._model.hidden(tokens_M[:, None], [OwnToken() for _ in self._model.make_cache()], None)[:, 0]

    def _compile(self, structure: Structure | None) -> Function:

        def forward(tokens_M: mx.array, arrays: Arrays, pools: Arrays, weights: Arrays, read: Arrays) -> mx.array:
            lora = None if structure is None else structure.lora(weights)
            return self._hidden(tokens_M, arrays, pools, lora, Read.of(read, lora) if read else None)

        compiled: Function = mx.compile(forward)
        return compiled

    def _hidden(
        self, tokens_M: mx.array, arrays: Arrays, pools: Arrays, lora: LoraBinding | None, read: Read | None
    ) -> mx.array:
        layout = FlatLayout(arrays, self._shapes)
        layers = [FlatLayer(layout, keys, values) for keys, values in zip(pools[::2], pools[1::2], strict=True)]
        if read is None:
            return self._model.hidden(tokens_M[:, None], layers, lora)[:, 0]
        with trimmed_last_layer(self._model, lambda hidden_MH: take_rows(hidden_MH, read.places_C), read.lora):
            return self._model.hidden(tokens_M[:, None], layers, lora)[:, 0]


def default_chunk() -> int:
    return LARGE_CHUNK if device_memory() >= LARGE_MEMORY else CHUNK


class FlatPrefill:
    """The interface is that of `Prefill`."""

    takes_turns = True

    def __init__(self, model: SharedModel, loras: LoraSelector, memory: PagedMemory, settings: EngineSettings) -> None:
        self.num_prompt_tokens = 0
        """Tokens of all jobs that have begun, cached ones included."""
        self.num_cached_tokens = 0
        """Tokens of these that came from the prefix cache."""
        self._model = model
        self._loras = loras
        self._memory = memory
        self._chunk = settings.prefill_chunk or default_chunk()
        self._shapes = head_shapes(model)
        for shape in self._shapes:
            try_flash_attention(model.dtype, *shape)
        self._forward = FlatForward(model, self._shapes)
        self._plan: Plan = []  # what `for_one_unit` has chosen

    @property
    def max_jobs(self) -> int:
        """Jobs that one unit may compute."""
        return MAX_CHUNKS

    def for_one_unit(self, jobs: Ordered[PrefillJob]) -> list[PrefillJob]:
        """The first job, and those after it of its adapter version or of versions that are computed with it, as many as
        have tokens in the unit. They begin."""
        self._plan = self._planned(jobs)
        return [job for job, _ in self._plan]

    def compute(self, jobs: Ordered[PrefillJob]) -> list[mx.array]:
        """Compute the next tokens of what `for_one_unit` chose; returns what to evaluate."""
        plan, self._plan = self._plan, []
        assert [job for job, _ in plan] == list(jobs), "what was chosen last"
        used = sum(chunk.size for _, chunk in plan)
        num_tokens = padded(used)
        tokens = [np.asarray(job.tokens[chunk.start : chunk.end]) for job, chunk in plan]
        tokens_M = _int32(*tokens, np.zeros(num_tokens - used))
        arrays = lay_out([chunk for _, chunk in plan], num_tokens, self._shapes)
        pools = [array for layer in self._memory.layers for array in layer]
        ends = list(accumulate(chunk.size for _, chunk in plan))
        done = [(job, end - 1) for (job, chunk), end in zip(plan, ends, strict=True) if chunk.end == len(job.tokens)]
        last_S, computed = [place for _, place in done], list[mx.array]()
        read_C = [*last_S, *[0] * (MAX_CHUNKS - len(last_S))] if self._trims(plan, num_tokens) else []
        adapters, lengths = zip(*((job.segment()[1], chunk.size) for job, chunk in plan), strict=True)
        lora, read_lora = self._loras.select_flat([*adapters, adapters[-1]], [*lengths, num_tokens - used], read_C)
        if read_C:
            read = Read(_int32(read_C), read_lora)
            hidden_SH = self._forward(tokens_M, arrays, pools, lora, read)[: max(1, len(last_S))]
        else:
            hidden_MH = self._forward(tokens_M, arrays, pools, lora)
            computed += self._scored(plan, ends, hidden_MH)
            hidden_SH = take_rows(hidden_MH, _int32(last_S)) if last_S else hidden_MH[:1]
        for job, chunk in plan:
            job.num_computed = chunk.end
        if not done:
            return [*computed, hidden_SH]
        logits_SV = self._model.head(hidden_SH)
        for row, (job, _) in enumerate(done):
            assert job.table is not None, "a job that was computed"
            job.logits_V = logits_SV[row, ...]
            self._memory.keep(job.sequences[0], job.table, len(job.tokens))
        return [*computed, logits_SV]

    def _trims(self, plan: Plan, num_tokens: int) -> bool:
        """Whether nothing is read of a unit but its prompts' last tokens, and it pays."""
        is_read = any(job.scorer is not None for job, _ in plan)
        return self._forward.can_trim and num_tokens >= TRIMMED_FROM and not is_read

    def _scored(self, plan: Plan, ends: Ordered[int], hidden_MH: mx.array) -> list[mx.array]:
        """Log-probs of prompts that are asked for."""
        found: list[mx.array] = []
        for (job, chunk), end in zip(plan, ends, strict=True):
            if job.scorer is not None:
                hidden_TH = hidden_MH[end - chunk.size : end]
                found += job.scorer.add(self._model, hidden_TH, job.tokens[chunk.start + 1 : chunk.end + 1])
        return found

    def keep_ended(self, decoder: Decoder) -> list[mx.array]:
        """Cache what sequences that have ended computed; nothing has to be evaluated."""
        assert isinstance(decoder.batch, PagedDecodeBatch)
        for sequence, table in zip(decoder.sequences, decoder.batch.tables, strict=True):
            if sequence.finish_reason is not None and sequence.request.is_continued and not sequence.is_broken:
                num_computed = len(sequence.request.prompt_tokens) + len(sequence.tokens) - 1
                self._memory.keep(sequence, table, num_computed)
        return []

    def _planned(self, jobs: Ordered[PrefillJob]) -> Plan:
        """Jobs that fit one unit, with their next tokens."""
        plan: Plan = []
        num_free, unit_adapters = self._chunk, self._unit_adapters(jobs)
        for job in jobs:
            if num_free == 0 or len(plan) == MAX_CHUNKS:
                break
            if plan and not _is_among(job.segment()[1], unit_adapters):
                continue
            if job.num_computed == 0:
                self._begin(job)
            end, adapter = job.segment()
            if not plan and not _is_among(adapter, unit_adapters):
                unit_adapters = [adapter]
            if _is_among(adapter, unit_adapters):
                assert job.table is not None, "a job begins with pages"
                end = min(end, job.num_computed + num_free)
                chunk = Chunk(job.num_computed, end, job.table.pages[: -(-end // PAGE)])
                plan.append((job, chunk))
                num_free -= chunk.size
        return plan

    def _unit_adapters(self, jobs: Ordered[PrefillJob]) -> list[Adapter | None]:
        """The versions of a unit that begins with the first job: its own, and others that stack with it."""
        first, num_tokens = jobs[0].segment()[1], 0
        if first is None:  # the base's prompts do without LoRA's products
            return [None]
        adapters = [first]
        for job in jobs:
            adapter = job.segment()[1]
            if num_tokens >= self._chunk or adapter is None:
                continue
            if not _is_among(adapter, adapters):
                if len(adapters) == MAX_FLAT:
                    continue
                adapters.append(adapter)
            num_tokens += len(job.tokens) - job.num_computed
        return [*adapters] if len(adapters) > 1 and self._loras.can_stack(adapters) else [first]

    def _begin(self, job: PrefillJob) -> None:
        num_cached = self._memory.begin(job)
        self.num_prompt_tokens += len(job.tokens)
        self.num_cached_tokens += num_cached
        for sequence in job.sequences if num_cached else ():
            if not sequence.tokens:
                sequence.num_cached_prompt_tokens = num_cached


def fits(model: SharedModel) -> bool:
    """Whether a flat forward computes the model here: its layers mix tokens by attention alone, each over keys and
    values of its own that the kernels take. Evaluates nothing, and compiles nothing."""
    return has_kernels() and model.is_batch_invariant and bool(head_shapes(model))


def head_shapes(model: SharedModel) -> list[HeadShape]:
    """The shapes of a model's layers, without repetition; none where it cannot be flat."""
    with listed_kernels():
        return list_kernels(model)


def list_kernels(model: SharedModel) -> list[HeadShape]:
    """`head_shapes`, by building a flat forward; see `listed_kernels`."""
    plain = model.make_cache()
    model.hidden(mx.zeros((1, 1), mx.int32), plain, None)
    layout = _AnyShape(lay_out([Chunk(0, STEP, range(STEP // PAGE))], STEP, ()), ())
    pools = [[_page(layer.keys), _page(layer.values)] for layer in plain]
    layers = [FlatLayer(layout, *pool) for pool in pools]
    try:
        model.hidden(mx.zeros((STEP, 1), mx.int32), layers, None)
    except (AssertionError, AttributeError, TypeError, ValueError):  # shapes or masks that a layer does not understand
        return []
    return list(layout.shapes) if all(layer.has_attended for layer in layers) else []


class _AnyShape(FlatLayout):
    """Collects the shapes of layers that are built."""

    def __init__(self, arrays: Ordered[mx.array], shapes: Ordered[HeadShape]) -> None:
        super().__init__(arrays, shapes)
        self.shapes: dict[HeadShape, None] = {}

    def tiles(self, shape: HeadShape) -> mx.array:
        self.shapes[shape] = None
        return mx.zeros((1, 8), mx.int32)


def _page(like_1HTD: mx.array) -> mx.array:
    _, heads, _, size = like_1HTD.shape
    return mx.zeros((1, heads, PAGE, size), like_1HTD.dtype)


def _is_among(adapter: Adapter | None, adapters: Ordered[Adapter | None]) -> bool:
    return any(adapter is one for one in adapters)


def _int32(*parts: npt.ArrayLike) -> mx.array:
    return uploaded(np.concatenate(parts).astype(np.int32))
