"""The packed forward: prompts and their completions as one flat sequence of tokens. `PolicyGradient` calls it.

Linear layers, norms and rotary embeddings see every token as a row, so they compute no padding. Only attention and
recurrences know which tokens belong together: a prompt is computed once, its completions attend to its keys and values,
and begin with its states. Gradients flow back into the prompt through them. With our CUDA kernels a layer attends in
one launch, whatever the lengths, and the flat sequence is padded to one of few sizes: MLX then finds buffers and CUDA
graphs of an earlier pass. Elsewhere, and for rows that are long and equal, each rectangle of rows attends in a call.

Axes: M computed tokens, S sequences, G completions, T longest of their inputs, P prompt tokens, H key-value heads,
Q query heads, D head size.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList

from parallm.model.attention import MIN_ROWS, attention
from parallm.model.kernels.cuda import VECTOR_BYTES, has_kernels
from parallm.model.kernels.flash_attention import PackedSequences, fits
from parallm.model.kernels.rotary import Rotation, rotated
from parallm.model.lora.linear import LoraBinding
from parallm.model.patches.forward import OwnCache
from parallm.model.patches.recurrence import PackedStates
from parallm.model.patches.rotary import before_rotation
from parallm.model.recurrence.rows import PackedRows, Row
from parallm.model.shared_model import SharedModel

FUSED_LENGTH = 128
"""MLX's CUDA build differentiates attention without keeping the scores only for multiples of this many queries. With
160 keys its gradient was seen to write out of bounds."""
ALIGNED_TOKENS = 16
"""cuBLAS uses slow kernels for numbers of tokens that are not multiples of 8."""
CHEAP_PADDING = 32
"""Rows are padded in place if that adds less than a 32nd; copies around attention cost a 20th (8B shape, H200)."""
LONG_ROW, MAX_CALLS = 512, 8
"""cuDNN attends 1.6 times as fast as our kernels (8 rows of 1,024, H200), and takes 0.3 ms a call on the host."""
CANONICAL_BITS, MIN_STEP = 5, 64
"""Between powers of two there are 16 canonical sizes, so padding adds a 32nd on average."""
MAX_ERROR, MAX_ERROR_16_BITS = 1e-3, 3e-2
"""Relative difference that a packed forward may have."""
MAX_GROWN_ERROR = 0.3
"""The same in 16 bits for recurrent layers, in which rounding grows, and for mixtures, where it makes a router choose
another expert. Random weights of Qwen3.5-0.8B have 0.08 on an H200, of Qwen3-30B-A3B between 0.03 and 0.3."""
UNPACKABLE = (AssertionError, AttributeError, IndexError, TypeError, ValueError)
"""Errors of layers that do not understand the shapes, masks or caches of a packed forward."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One prompt and runs of completions: a run is `count` rows of `length` inputs."""

    prompt: int
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def sizes(self) -> list[int]:
        """Tokens of the prompt and of each run, in the order of the flat sequence."""
        return [self.prompt, *(count * length for count, length in self.runs)]

    @property
    def row_lengths(self) -> list[int]:
        """Inputs of the rows in each rectangle: the runs, or the prompt alone."""
        return [length for _, length in self.runs] or [self.prompt]

    def sequences(self, start: int) -> list[tuple[int, int, int, int]]:
        """Prompt and rows from token `start` on, as `PackedSequences` takes them."""
        lengths = [length for count, length in self.runs for _ in range(count)]
        starts = accumulate(lengths, initial=start + self.prompt)
        rows = [(first, length, start, self.prompt) for first, length in zip(starts, lengths, strict=False)]
        return [(start, self.prompt, 0, 0), *rows]

    def rows(self, start: int, first: int) -> list[Row]:
        """The same for recurrent layers; `first` rows come before."""
        sequences = self.sequences(start)
        return [Row(begin, length, first if prompt else None) for begin, length, _, prompt in sequences]

    def positions(self) -> list[np.ndarray]:
        """Position of each token in its own sequence."""
        after = [np.tile(np.arange(self.prompt, self.prompt + length), count) for count, length in self.runs]
        return [np.arange(self.prompt), *after]


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A mask: a token sees itself and the `size` - 1 tokens before it."""

    size: int


class PackedLayer(OwnCache):
    """The cache of a layer in a packed forward: keeps nothing, and attends within each segment."""

    def __init__(self, segments: Sequence[Segment], num_padding: int = 0) -> None:
        """`num_padding` tokens after those of the segments see nothing, and nothing sees them."""
        self._blocks = _blocks(segments)
        self._num_padding = num_padding
        self._sequences = None
        self._angles: dict[Rotation, mx.array] = {}  # the same for all layers
        positions = [*(part for segment in segments for part in segment.positions()), np.zeros(num_padding)]
        self.offset = mx.array(np.concatenate(positions).astype(np.int32))
        self.takes_rows = has_kernels() and not attends_by_rectangles(segments)
        """Whether all layers so far attended in one launch."""
        if self.takes_rows:
            starts = accumulate((sum(segment.sizes) for segment in segments), initial=0)
            sequences = [s for segment, start in zip(segments, starts, strict=False) for s in segment.sequences(start)]
            self._sequences = PackedSequences(np.array(sequences).reshape(-1, 4), self.offset.size)

    def make_mask(self, _: int, return_array: bool = False, window_size: int | None = None) -> SlidingWindow | None:
        assert not return_array, "a model that computes with masks cannot be packed"
        return None if window_size is None else SlidingWindow(window_size)

    def update_and_fetch(self, keys_MH1D: mx.array, values_MH1D: mx.array) -> tuple[mx.array, mx.array]:
        return keys_MH1D, values_MH1D

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: mx.array | str | SlidingWindow | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Queries (M, Q, 1, D), keys and values (M, H, 1, D) -> (M, Q, 1, D)."""
        window = mask.size if isinstance(mask, SlidingWindow) else None
        flat_MXD = (*self._rotated(queries, keys), values[:, :, 0])
        if self._sequences is not None and fits(*flat_MXD):
            return self._sequences.attend(*flat_MXD, scale=scale, window=window, sinks_Q=sinks)[:, :, None]
        self.takes_rows = False
        cuts = list(accumulate(size for block in self._blocks for size in _sizes(block)))
        cuts = cuts if self._num_padding else cuts[:-1]
        parts = zip(*(mx.split(array, cuts) for array in flat_MXD), strict=True)
        attended_parts: list[mx.array] = []
        for block in self._blocks:
            lengths = [segment.prompt for segment in block]
            prompts = _AttentionRows(*(_stacked(part, lengths) for part in next(parts)))
            attended = prompts.attend(prompts.keys, prompts.values, scale, window, sinks)
            attended_parts.append(_unstacked(attended, lengths))
            for count, _ in block[0].runs:
                run = _AttentionRows(*(_stacked(part, [len(part) // count] * count) for part in next(parts)))
                keys_GLHD, values_GLHD = _with_prompt(prompts.keys, run.keys), _with_prompt(prompts.values, run.values)
                attended_parts.append(run.attend(keys_GLHD, values_GLHD, scale, window, sinks).flatten(0, 1))
        if self._num_padding:
            attended_parts.append(mx.zeros_like(next(parts)[0]))
        return mx.concatenate(attended_parts)[:, :, None]

    def _rotated(self, queries: mx.array, keys: mx.array) -> tuple[mx.array, mx.array]:
        """Rotated queries and keys without the axis of one position; by our own kernel if it knows the rotation."""
        rotation = None
        if has_kernels() and queries.shape[-1] * queries.dtype.size % VECTOR_BYTES == 0:
            queries, keys, rotation = before_rotation(queries, keys, self.offset, queries.dtype)
        if rotation is None:
            return queries[:, :, 0], keys[:, :, 0]
        if rotation not in self._angles:
            self._angles[rotation] = rotation.angles(self.offset)
        first, second = (array.reshape(*array.shape[:2], -1) for array in (queries, keys))
        angles_MP2 = self._angles[rotation]
        return rotated(first, angles_MP2, rotation), rotated(second, angles_MP2, rotation)


@dataclass(frozen=True, slots=True)
class _AttentionRows:
    """Rows of one length: queries (G, T, Q, D), keys and values (G, T, H, D)."""

    queries: mx.array
    keys: mx.array
    values: mx.array

    def attend(
        self, keys_GLHD: mx.array, values_GLHD: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        """Causal attention (G, T, Q, D); the last query is at the last position."""
        length, positions = self.queries.shape[1], keys_GLHD.shape[1]
        mask: mx.array | str = "causal"
        before = after = 0
        if window is not None and window < positions:
            distance = mx.arange(positions - length, positions)[:, None] - mx.arange(positions)[None]
            mask = (distance >= 0) & (distance < window)
        else:
            # no query sees keys after its own, and the queries padded before are dropped
            after = -positions % _fused_length()
            before = -(length + after) % _fused_length()
        queries = _padded(self.queries, before, after)
        # heads first, by strides: nothing is copied
        rows = [part.swapaxes(1, 2) for part in (queries, _padded(keys_GLHD, 0, after), _padded(values_GLHD, 0, after))]
        attended = attention(*rows, scale=scale, mask=mask, sinks=sinks).swapaxes(1, 2)
        return attended[:, before : before + length] if before or after else attended


def packed_hidden(
    model: SharedModel, inputs_M: mx.array, segments: Sequence[Segment], lora: LoraBinding | None
) -> mx.array:
    """Hidden states (M, hidden) of a flat sequence that `segments` describe."""
    return padded_hidden(model, inputs_M, segments, lora)[: inputs_M.size]


def padded_hidden(
    model: SharedModel, inputs_M: mx.array, segments: Sequence[Segment], lora: LoraBinding | None
) -> mx.array:
    """`packed_hidden` with the hidden states of padding tokens after it."""
    num_padding = num_padding_rows(inputs_M.size)
    if has_kernels() and not attends_by_rectangles(segments):
        num_padding = canonical_size(inputs_M.size) - inputs_M.size
    if num_padding > 0:
        inputs_M = mx.concatenate([inputs_M, mx.zeros((num_padding,), mx.int32)])
    caches = packed_caches(model.make_cache(), segments, PackedLayer(segments, num_padding))
    return model.hidden(inputs_M[:, None], caches, lora)[:, 0]


def packed_caches(caches: Sequence[Any], segments: Sequence[Segment], layer: PackedLayer) -> list[Any]:
    """A cache for each of a model's own in a packed forward: `layer`, or states of the same segments."""
    rows: list[Row] = []
    start = 0
    for segment in segments:
        rows += segment.rows(start, len(rows))
        start += sum(segment.sizes)
    packed = PackedRows(rows, layer.offset.size)

    def stand_in(cache: Any) -> Any:
        if isinstance(cache, ArraysCache):
            return PackedStates(packed, len(cache.cache))
        if isinstance(cache, CacheList):
            return tuple(map(stand_in, cache.caches))
        return layer

    return [stand_in(cache) for cache in caches]


def can_pack(model: SharedModel) -> bool:
    """Whether a packed forward gives the model's own hidden states: tried with a few tokens.

    It does if layers mix tokens by `scaled_dot_product_attention`, without own position scores (multi-head latent
    attention), and by the recurrences and convolutions of `model/patches/recurrence.py`.
    """
    if not model.make_cache():  # an encoder
        return False
    prompt, completions = [3, 1, 4, 1, 5], [[9, 2], [6, 5]]
    segments = [Segment(prompt=len(prompt), runs=((2, 2),))]
    allowed = _allowed_error(model)
    try:
        packed = packed_hidden(model, mx.array(prompt + completions[0] + completions[1]), segments, None)
        whole = [model.hidden(mx.array([prompt + tokens]), model.make_cache(), None)[0, ...] for tokens in completions]
        error = _relative_error(packed, mx.concatenate([whole[0], whole[1][len(prompt) :]]))
        # rows that see each other may differ by no more than a mixture's rounding: 0.2 was seen
        other = packed_hidden(model, mx.array(prompt + [7, 8] + completions[1]), segments, None)
        seen = _relative_error(other[-2:], packed[-2:])
    except UNPACKABLE as failure:
        logger.info("%s learns row by row: its layers do not take packed rows: %s", model.name, failure)
        return False
    if error < allowed and seen < MAX_ERROR_16_BITS:
        return True
    logger.info(
        "%s learns row by row: hidden states of packed rows differ by %.1e from those alone, where rounding allows "
        "%.1e, and by %.1e with the tokens of another row, where %.1e is allowed",
        *(model.name, error, allowed, seen, MAX_ERROR_16_BITS),
    )
    return False


def _relative_error(found: mx.array, expected: mx.array) -> float:
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    return float((mx.linalg.norm(found - expected) / mx.linalg.norm(expected)).item())


def _allowed_error(model: SharedModel) -> float:
    if model.dtype == mx.float32:
        return MAX_ERROR
    return MAX_GROWN_ERROR if model.has_states or model.experts_per_token > 1 else MAX_ERROR_16_BITS


def takes_rows(model: SharedModel) -> bool:
    """Whether the layers of a packed forward attend to rows of any lengths in one launch. Evaluates nothing."""
    caches = model.make_cache()
    if not has_kernels() or not caches:
        return False
    layer = PackedLayer([Segment(prompt=MIN_ROWS)])
    try:
        packed = packed_caches(caches, [Segment(prompt=MIN_ROWS)], layer)
        model.hidden(mx.zeros((MIN_ROWS, 1), mx.int32), packed, None)
    except UNPACKABLE:
        return False
    return layer.takes_rows


def attends_by_rectangles(segments: Sequence[Segment]) -> bool:
    """Whether few calls of cuDNN attend to all rows, faster than our kernels would."""
    num_calls = sum(1 + len(block[0].runs) for block in _blocks(segments))
    return num_calls <= MAX_CALLS and are_alike([length for segment in segments for length in segment.row_lengths])


def are_alike(lengths: Sequence[int]) -> bool:
    """Whether rows of these lengths are long, and nearly equal."""
    return min(lengths, default=0) >= LONG_ROW and canonical_size(min(lengths)) == canonical_size(max(lengths))


def canonical_size(size: int) -> int:
    """The next of a few sizes, a multiple of `MIN_STEP`."""
    step = max(MIN_STEP, 1 << max(0, size.bit_length() - CANONICAL_BITS))
    return -(-size // step) * step


def num_padding_rows(num_rows: int) -> int:
    """Rows that pad a matrix product."""
    # with fewer rows than the engine's it would round differently; on a GPU it is slow unless aligned
    return max(0, MIN_ROWS - num_rows, -num_rows % _aligned_tokens())


def padded_length(length: int) -> int:
    """`length`, or the next multiple that a GPU's attention accepts, if that adds few tokens."""
    longer = length + -length % _fused_length()
    return longer if (longer - length) * CHEAP_PADDING <= length else length


def _fused_length() -> int:
    return 1 if mx.default_device() == mx.Device(mx.cpu) else FUSED_LENGTH


def _aligned_tokens() -> int:
    return 1 if mx.default_device() == mx.Device(mx.cpu) else ALIGNED_TOKENS


def _blocks(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Neighbours that attend in one call: prompts of one padded length without completions."""
    blocks: list[list[Segment]] = []
    for segment in segments:
        fits = blocks and not segment.runs and not blocks[-1][0].runs
        if fits and segment.prompt // -_fused_length() == blocks[-1][0].prompt // -_fused_length():
            blocks[-1].append(segment)
        else:
            blocks.append([segment])
    return blocks


def _sizes(block: Sequence[Segment]) -> list[int]:
    """Tokens of the prompts together, and of each run."""
    return [sum(segment.prompt for segment in block), *block[0].sizes[1:]]


def _stacked(flat_MHD: mx.array, lengths: Sequence[int]) -> mx.array:
    """Consecutive rows of these lengths -> (G, longest, H, D), padded with zeros."""
    if len(set(lengths)) == 1:
        return flat_MHD.reshape(len(lengths), -1, *flat_MHD.shape[1:])
    rows = mx.split(flat_MHD, list(accumulate(lengths))[:-1])
    return mx.concatenate([_padded(row[None], 0, max(lengths) - len(row)) for row in rows])


def _unstacked(rows_GTHD: mx.array, lengths: Sequence[int]) -> mx.array:
    """The inverse of `_stacked`."""
    if len(set(lengths)) == 1:
        return rows_GTHD.flatten(0, 1)
    return mx.concatenate([row[:length] for row, length in zip(rows_GTHD, lengths, strict=True)])


def _padded(rows_GTHD: mx.array, before: int, after: int) -> mx.array:
    shapes = [(rows_GTHD.shape[0], count, *rows_GTHD.shape[2:]) for count in (before, after)]
    zeros = [mx.zeros(shape, rows_GTHD.dtype) if shape[1] else None for shape in shapes]
    parts = [part for part in (zeros[0], rows_GTHD, zeros[1]) if part is not None]
    return mx.concatenate(parts, axis=1) if len(parts) > 1 else rows_GTHD


def _with_prompt(shared_1PHD: mx.array, own_GTHD: mx.array) -> mx.array:
    repeated = mx.broadcast_to(shared_1PHD, (own_GTHD.shape[0], *shared_1PHD.shape[1:]))
    return mx.concatenate([repeated, own_GTHD], axis=1)
