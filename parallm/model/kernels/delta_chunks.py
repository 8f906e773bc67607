"""The gated delta rule in chunks with a gate per head, as four CUDA kernels; `recurrence/gated_delta.py` calls them.

By MLX's operations and smaller kernels a layer takes 180 launches forward and backward, most of them over float32
arrays of all chunks, and more of the host's time than of the GPU's. Here `delta_terms` computes what a chunk needs of
its tokens, `delta_scan` passes states through the chunks of rows, `delta_outputs` reads them; in the backward the first
two compute their terms again, `delta_scan` passes gradients back, and `delta_gradient` takes them to the inputs.
Kernels read tokens, and write outputs and gradients, where they are. Products have tensor cores: a float32 number is
the sum of two of TF32, a number of 16 bits is one of them, so that nothing but the results is rounded to 16 bits.

Axes: M tokens, N chunks, R rows, H value heads, C tokens of a chunk, Dk, Dv head sizes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx

from parallm.model.kernels.compiler import Defines, Specialization
from parallm.model.kernels.cuda import MIN_ON_DEVICE, interned_array, kernel, max_shared_bytes
from parallm.model.kernels.recurrent import has_kernels

SCAN = "delta_scan"
CHUNK = 64
"""C: what the kernels are written for."""
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
UNIT = 32  # of head sizes: columns that the warps of a product share
SLICES = (128, 64, 32)  # lines of a state in a block of the scan
MIN_BLOCKS = 96
"""Blocks with which a scan fills a GPU; with fewer rows they take smaller slices. An H200 has 132 multiprocessors, of
which each holds one block with the largest slice."""
OUTPUTS_SLICE = 64
STEP = 64  # lines of a state that the gradient reads at a time
THREADS, MANY_THREADS = 256, 512  # of a block
VECTOR_BYTES = 16
STATIC_BYTES = 8_000
"""The largest shared memory that a kernel declares itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs of the rule, and the tokens of its chunks."""

    q_MKD: mx.array
    k_MKD: mx.array
    v_MHD: mx.array
    log_a_MH: mx.array
    b_MH: mx.array
    tokens_NC: mx.array
    """int32, -1 for none; after the chunks, such of tokens that are in none, whose results are zeros."""
    num_chunks: int
    """N, without those."""

    @property
    def arrays(self) -> list[mx.array]:
        return [self.q_MKD, self.k_MKD, self.v_MHD, self.log_a_MH, self.b_MH, self.tokens_NC]

    @property
    def heads(self) -> int:
        return self.v_MHD.shape[1]

    @property
    def per_key(self) -> int:
        """Value heads of a key head."""
        return self.v_MHD.shape[1] // self.k_MKD.shape[1]

    @property
    def keys(self) -> int:
        """Dk."""
        return self.k_MKD.shape[2]

    @property
    def values(self) -> int:
        """Dv."""
        return self.v_MHD.shape[2]

    def defines(self, threads: int) -> Defines:
        sizes = (("C", CHUNK), ("DK", self.keys), ("DV", self.values), ("PER_KEY", self.per_key))
        return ("T", self.v_MHD.dtype), *sizes, ("THREADS", threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The results of `delta_terms`, float32."""

    values: mx.array
    """V (N, H, C, Dv); what a gradient passes back in its place, in a backward scan."""
    removals: mx.array
    """W (N, H, C, Dk)."""
    inner: mx.array
    """P (N, H, C, C)."""
    gates: mx.array
    """(N, H, 2, C): those up to each token, and those after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardTerms:
    """The same for a backward, given the gradient of the outputs."""

    terms: Terms
    of_keys: mx.array
    """D (k k^T), with D the gates between two tokens, (N, H, C, C)."""
    inverse: mx.array
    """(I + L)^-1 (N, H, C, C)."""
    within: mx.array
    """P^T times the gradient of the outputs, (N, H, C, Dv)."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """States (N, H, Dv, Dk) before each chunk and changes (N, H, C, Dv); of a backward, the gradients of the states
    after each, and of the changes."""

    states: mx.array
    deltas: mx.array


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows whose states pass through their chunks at the same time."""

    counts: Sequence[int]
    """Rows in each step: the first ones. Their chunks follow each other."""
    first: int
    """Index of the first chunk."""
    origins: Sequence[int]
    """The place of the state that each row begins with; -1: zeros."""
    targets: Sequence[int]
    """The place of the state after each row."""


def fits(inputs: Sequence[mx.array], size: int) -> bool:
    """Whether the kernels can compute chunks of `size` tokens of q, k, v, log a and b on this device."""
    q_MKD, k_MKD, v_MHD, log_a_MH, b_MH = inputs
    keys, values = k_MKD.shape[2], v_MHD.shape[2]
    item = v_MHD.dtype.size
    return (
        has_kernels()
        and size == CHUNK
        and log_a_MH.ndim == 2
        and log_a_MH.dtype == mx.float32
        and all(array.dtype == v_MHD.dtype for array in (q_MKD, k_MKD, b_MH))
        and v_MHD.dtype in DTYPES
        and keys % UNIT == values % UNIT == 0
        and max(_gradient_bytes(keys, values, item), _scan_bytes(UNIT, keys, item, is_back=True)) + STATIC_BYTES
        <= max_shared_bytes()
    )


def delta_terms(inputs: Inputs) -> Terms:
    """The terms of a scan."""
    return Terms(**dict(zip(("values", "removals", "inner", "gates"), _terms(inputs, None), strict=True)))


def delta_terms_back(inputs: Inputs, slopes_MHD: mx.array) -> BackwardTerms:
    """The same for a backward, with the gradient of the outputs."""
    values, removals, inner, gates, of_keys, inverse, within = _terms(inputs, slopes_MHD)
    terms = Terms(values=values, removals=removals, inner=inner, gates=gates)
    return BackwardTerms(terms=terms, of_keys=of_keys, inverse=inverse, within=within)


def _terms(inputs: Inputs, slopes_MHD: mx.array | None) -> list[mx.array]:
    chunks, heads, keys, values = inputs.num_chunks, inputs.heads, inputs.keys, inputs.values
    squares = chunks, heads, CHUNK, CHUNK
    shapes = [(chunks, heads, CHUNK, values), (chunks, heads, CHUNK, keys), squares, (chunks, heads, 2, CHUNK)]
    if slopes_MHD is not None:
        shapes += [squares, squares, (chunks, heads, CHUNK, values)]
    item, tiles_of_values = inputs.v_MHD.dtype.size, 1 if slopes_MHD is None else 2
    shared = 8 * CHUNK * (CHUNK + 4) + CHUNK * (2 * _line(keys, item) + tiles_of_values * _line(values, item))
    return kernel("delta_terms", (*inputs.defines(THREADS), ("BACK", slopes_MHD is not None)), shared_memory=shared)(
        [*inputs.arrays, *([] if slopes_MHD is None else [slopes_MHD])],
        [heads],
        grid=(chunks * heads * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=shapes,
        output_dtypes=[mx.float32] * len(shapes),
    )


def delta_scan(
    inputs: Inputs, terms: Terms, initial_RHVK: mx.array | None, rows: Rows, slopes_MHD: mx.array | None = None
) -> tuple[Scanned, mx.array]:
    """Pass the states of rows through their chunks; of these alone is the result, and the states after the rows.

    With the gradient of the outputs those of the states pass back, and `terms.values` is `BackwardTerms.within`.
    """
    heads, keys, values, item = inputs.heads, inputs.keys, inputs.values, inputs.v_MHD.dtype.size
    num_rows, num_chunks, is_back = len(rows.targets), sum(rows.counts), slopes_MHD is not None
    slices = _slices(keys, values, item)
    # the most lines with which blocks fill the GPU, or else the fewest
    lines = next((lines for lines in slices if num_rows * heads * (values // lines) >= MIN_BLOCKS), slices[-1])
    threads = _scan_threads(lines)
    starts = (0, *accumulate(rows.counts))
    places = tuple(place for pair in zip(rows.origins, rows.targets, strict=True) for place in pair)
    unread = (0,) * MIN_ON_DEVICE
    states, deltas, last = kernel(
        SCAN,
        (*inputs.defines(threads), ("SLICE", lines), ("BACK", is_back)),
        shared_memory=_scan_bytes(lines, keys, item, is_back=is_back),
    )(
        [
            inputs.k_MKD,
            *([] if slopes_MHD is None else [inputs.q_MKD, slopes_MHD]),
            *(inputs.tokens_NC, terms.gates, terms.values, terms.removals),
            terms.gates if initial_RHVK is None else initial_RHVK,  # not read where all rows begin with zeros
            *(interned_array(places + unread, mx.int32), interned_array(starts + unread, mx.int32)),
        ],
        [rows.first, heads, len(rows.counts)],
        grid=(num_rows * heads * (values // lines) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[
            (num_chunks, heads, values, keys),
            (num_chunks, heads, CHUNK, values),
            (num_rows, heads, values, keys),
        ],
        output_dtypes=[mx.float32] * 3,
    )
    return Scanned(states, deltas), last


def delta_outputs(inputs: Inputs, terms: Terms, scanned: Scanned) -> mx.array:
    """The outputs (M, H, Dv), in the inputs' type."""
    heads, keys, values, item = inputs.heads, inputs.keys, inputs.values, inputs.v_MHD.dtype.size
    lines = OUTPUTS_SLICE if values % OUTPUTS_SLICE == 0 else UNIT
    numbers = lines * (keys + 4) + CHUNK * (lines + 8) + CHUNK * (CHUNK + 4)
    return kernel(
        "delta_outputs",
        (*inputs.defines(THREADS), ("SLICE", lines)),
        shared_memory=4 * numbers + CHUNK * _line(keys, item),
    )(
        [inputs.q_MKD, inputs.tokens_NC, terms.gates, terms.inner, scanned.states, scanned.deltas],
        [inputs.num_chunks, heads],
        grid=(inputs.tokens_NC.shape[0] * heads * (values // lines) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[inputs.v_MHD.shape],
        output_dtypes=[inputs.v_MHD.dtype],
    )[0]


def delta_gradient(
    inputs: Inputs, slopes_MHD: mx.array, back: BackwardTerms, scanned: Scanned, gradients: Scanned
) -> list[mx.array]:
    """Gradients of q, k, v, log a and b, in their types, given those of the outputs, the states and the changes."""
    k, v = inputs.k_MKD, inputs.v_MHD
    of_head = v.dtype if inputs.per_key == 1 else mx.float32
    step = STEP if inputs.values % STEP == 0 else UNIT
    of_heads = (*v.shape[:2], inputs.keys)
    of_q, of_k, of_v, of_log_a, of_b = kernel(
        "delta_gradient",
        (*inputs.defines(MANY_THREADS), ("STEP", step), ("R", of_head)),
        shared_memory=_gradient_bytes(inputs.keys, inputs.values, v.dtype.size),
    )(
        [
            *(*inputs.arrays, slopes_MHD, back.terms.values, back.terms.removals, back.terms.inner, back.terms.gates),
            *(back.of_keys, back.inverse, scanned.states, scanned.deltas, gradients.states, gradients.deltas),
        ],
        [inputs.num_chunks, inputs.heads],
        grid=(inputs.tokens_NC.shape[0] * inputs.heads * MANY_THREADS, 1, 1),
        threadgroup=(MANY_THREADS, 1, 1),
        output_shapes=[of_heads, of_heads, v.shape, inputs.log_a_MH.shape, inputs.b_MH.shape],
        output_dtypes=[of_head, of_head, v.dtype, mx.float32, v.dtype],
    )
    if inputs.per_key > 1:
        grouped = (*k.shape[:2], inputs.per_key, inputs.keys)
        of_q, of_k = (array.reshape(grouped).sum(axis=2).astype(v.dtype) for array in (of_q, of_k))
    return [of_q, of_k, of_v, of_log_a, of_b]


def with_any_rows(kernels: Iterable[Specialization]) -> list[Specialization]:
    """`kernels`, and the scans of other numbers of rows."""
    listed = dict.fromkeys(kernels)
    for name, defines in [one for one in listed if one[0] == SCAN]:
        macros: dict[str, Any] = dict(defines)
        for lines in _slices(macros["DK"], macros["DV"], macros["T"].size):
            listed[name, tuple((macros | {"THREADS": _scan_threads(lines), "SLICE": lines}).items())] = None
    return list(listed)


def _slices(keys: int, values: int, item: int) -> list[int]:
    """Lines of a state that a block of the scan can take."""
    shared = ((lines, _scan_bytes(lines, keys, item, is_back=True) + STATIC_BYTES) for lines in SLICES)
    return [lines for lines, size in shared if values % lines == 0 and size <= max_shared_bytes()]


def _scan_threads(lines: int) -> int:
    return MANY_THREADS if lines == SLICES[0] else THREADS


def _line(size: int, item: int) -> int:
    """Bytes of a line of numbers of the inputs' type in shared memory."""
    return size * item + VECTOR_BYTES


def _scan_bytes(lines: int, keys: int, item: int, *, is_back: bool) -> int:
    numbers = (lines + CHUNK) * (keys + 4) + CHUNK * (lines + 8)
    of_inputs = _line(keys, item) * (2 if is_back else 1) + (_line(lines, item) if is_back else 0)
    return 4 * numbers + CHUNK * of_inputs


def _gradient_bytes(keys: int, values: int, item: int) -> int:
    wide = max(values, CHUNK)
    numbers = 2 * (keys + 8) + 2 * wide + 12 + CHUNK + 8 + max(CHUNK + 4, _line(values, item) // 4)
    return CHUNK * (4 * numbers + 2 * _line(keys, item))
