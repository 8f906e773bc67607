"""Products of a step's rows with a linear layer's weights, as one CUDA kernel that multiplies by all A of LoRA as well:
by warps where rows are few, else by warpgroups (`warpgroup_gemm.py`).

A product of few rows takes as long as its weights take to be read, by MLX's kernels as by ours. On an H200 MLX's cost
the host 14 microseconds, though, and ours 8; a sum that several blocks share is added up by a kernel of its own there,
and here by its reader (`segmented_lora.expand`); and A is a few more rows of the weights in place of another kernel.
Where A was multiplied by before (`add_norm.py`), B is a few more columns of the weights. Products of many rows take up
to twice as long as MLX's, but can be captured (`cuda_graph.py`), without which steps of small models wait for their
launches (`scripts/figures engine.gpu.more_rows engine.gpu.control_more_rows`).

Axes: B rows, T tokens, I input, O output, S parts of the input whose sums are still to be added, V versions, K ranks of
a group's targets side by side.
"""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import mlx.nn as nn

from parallm.model.kernels.compiler import Defines
from parallm.model.kernels.cuda import architecture, has_kernels, is_capturing, kernel
from parallm.model.kernels.segmented_lora import GroupWeights
from parallm.model.kernels.warpgroup_gemm import (
    MAX_SHARED_BYTES,
    OUTPUTS_OF_GROUP,
    PROCESSORS,
    WEIGHT_OF_ROWS,
    WarpgroupPlan,
    num_waves,
    parts_written,
    plan_of_warpgroups,
)

MIN_ROWS, MAX_ROWS = 2, 32  # MLX has a kernel of its own for one row, and is faster from 40 rows on
MAX_ROWS_OF_SMALL = 128
"""The same for weights that take less time than their launch."""
SMALL = 1 << 24  # values of weights that count as small
MAX_CAPTURED_ROWS = 1024
MAX_PRODUCTS = 1 << 31
"""Captured rows by the square of a product's shorter side, mostly the hidden size: beyond, MLX's products are faster by
more than their launches. So all of a layer are taken, or none, and a step is captured: 128 rows of an 8B shape, 512 of
2,048 numbers. Where sides differ, as in divided models, the longest that all allow are."""
MAX_VERSIONS = 16  # of which A is multiplied by, whether a row uses it or not
MIN_INPUTS = 32  # that a warp multiplies at once: inputs are a multiple of it
OUTPUTS_OF_WARP, ROWS_OF_TILE = 16, 8
MAX_WIDE, MAX_WARPS = 14, 16  # warps side by side, and in all
SPLITS = (1, 2, 4)
CHUNKS = (256, 128, 64)
MAX_DEEP_OF_PARTS = 4  # warps that share a sum of a part: each has little to do beside adding them up
MIN_STAGES, MAX_STAGES = 3, 8
MIN_STAGES_OF_NARROW = 2  # of blocks a warp wide, which need long chunks for all their warps


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrunkRows:
    """A group's LoRA for rows of one version after A."""

    weights: GroupWeights
    shrunk_BK: mx.array
    """The products, of the weights' type; zeros for rows without a version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpPlan:
    """The shares of the blocks in a product of few rows."""

    kernel = "small_batch_gemm"

    tiles: int
    """Tiles of 8 rows: 1, or a power of two."""
    wide: int
    """Warps side by side."""
    deep: int
    """Warps that share each sum."""
    chunk: int
    """Values of the input that are fetched at once."""
    stages: int
    splits: int
    """Parts of the input."""

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return ROWS_OF_TILE * self.tiles

    @property
    def outputs(self) -> int:
        """Outputs of a block."""
        return OUTPUTS_OF_WARP * self.wide

    @property
    def threads(self) -> int:
        return 32 * self.wide * self.deep

    def shared_bytes(self, *, adds: bool) -> int:
        sums = self.deep * self.rows * (self.outputs + 4) * 4
        return max(self.stages * _stage_bytes(self.tiles, self.wide, self.chunk), sums)

    @property
    def defines(self) -> Defines:
        names = ("TILES", "WIDE", "DEEP", "CHUNK", "STAGES")
        return tuple(zip(names, (self.tiles, self.wide, self.deep, self.chunk, self.stages), strict=True))


GemmPlan = WarpPlan | WarpgroupPlan


def fits(x_BTI: mx.array, linear: nn.Module) -> bool:
    """Whether `small_batch_gemm` is to compute `linear` of this input on this device; of more rows where a step is
    captured. Other GPUs than Hopper have not been measured."""
    if not has_kernels() or type(linear) is not nn.Linear or architecture() != "sm_90":
        return False
    weight_OI = linear.weight
    rows, (outputs, inputs) = x_BTI.shape[0] * x_BTI.shape[1], weight_OI.shape
    return (
        rows >= MIN_ROWS
        and (_pays(rows, weight_OI) or (is_capturing() and _may_be_captured(rows, weight_OI)))
        and x_BTI.dtype == weight_OI.dtype
        and x_BTI.dtype in (mx.bfloat16, mx.float16)
        and inputs % MIN_INPUTS == 0
        and outputs % 8 == 0
    )


def _pays(rows: int, weight_OI: mx.array) -> bool:
    """Whether it is faster than MLX's product where both are launched."""
    return rows <= (MAX_ROWS_OF_SMALL if weight_OI.size < SMALL else MAX_ROWS)


def _may_be_captured(rows: int, weight_OI: mx.array) -> bool:
    """Whether a captured step is faster than one of MLX's products, which cannot be captured."""
    return rows <= MAX_CAPTURED_ROWS and rows * min(weight_OI.shape) ** 2 <= MAX_PRODUCTS


def can_add(x_BTI: mx.array, linear: nn.Module, weights: GroupWeights) -> bool:
    """Whether `small_batch_gemm` can add the products of a group's `ShrunkRows` to whole outputs."""
    if not fits(x_BTI, linear) or weights.array_VN.shape[0] > 1:
        return False
    outputs, inputs = linear.weight.shape
    chosen = plan(x_BTI.shape[0] * x_BTI.shape[1], inputs, outputs, 0, is_whole=True)
    return sum(weights.layout.ranks) <= chosen.chunk  # where B comes after the last values


def small_batch_gemm(
    x_BTI: mx.array,
    linear: nn.Linear,
    weights: GroupWeights | None,
    *,
    is_whole: bool,
    is_gated: bool = False,
    added: ShrunkRows | None = None,
) -> tuple[mx.array, mx.array | None]:
    """Outputs (S, B, T, O) and, with `weights` of few enough versions, `hidden` as `segmented_lora.shrink` gives it.

    S is 1, and the type that of the input, if `is_whole`; parts are float32. With `is_gated`, which needs whole outputs
    and no weights, these are SwiGLU of their halves, (1, B, T, O / 2): silu of the first by the second. The products of
    `added` with B come to whole outputs before they are rounded (`can_add`).
    """
    assert not is_gated or (is_whole and weights is None and linear.weight.shape[0] % 16 == 0)
    assert added is None or (is_whole and weights is None)
    if weights is not None and weights.array_VN.shape[0] > MAX_VERSIONS:
        weights = None
    bias_O = linear.bias if "bias" in linear else None
    return _multiply(x_BTI, linear.weight, bias_O, weights, added, is_whole=is_whole, is_gated=is_gated)


def _multiply(
    x_BTI: mx.array,
    weight_OI: mx.array,
    bias_O: mx.array | None,
    weights: GroupWeights | None,
    added: ShrunkRows | None,
    *,
    is_whole: bool,
    is_gated: bool,
) -> tuple[mx.array, mx.array | None]:
    (rows, tokens, inputs), outputs = x_BTI.shape, weight_OI.shape[0]
    layout = weights.layout if weights else added.weights.layout if added else None
    ranks = sum(layout.ranks) if layout else 0
    columns = weights.array_VN.shape[0] * ranks if weights else 0
    chosen = plan(rows * tokens, inputs, outputs, columns, is_whole=is_whole)
    arrays = [x_BTI, weight_OI, *([] if bias_O is None else [bias_O])]
    sizes = [rows * tokens, inputs, outputs]
    if weights:
        arrays += [weights.starts, weights.array_VN]
        sizes = [*weights.array_VN.shape, *sizes]
    if added:
        arrays += [added.shrunk_BK, added.weights.starts, added.weights.array_VN]
    sums = x_BTI.dtype if chosen.splits == 1 else mx.float32
    defines = (
        ("T", x_BTI.dtype),
        ("Y", sums),
        ("HAS_BIAS", bias_O is not None),
        ("HAS_LORA", weights is not None),
        ("PLUS", added is not None),
        ("GATED", is_gated),
        ("K", ranks),
        ("WIDTHS", ", ".join(map(str, layout.widths)) if added and layout else ""),
        ("RANKS", ", ".join(map(str, layout.ranks)) if added and layout else ""),
        ("TARGETS", len(layout.ranks) if added and layout else 0),
        *chosen.defines,
    )
    blocks = (-(-outputs // chosen.outputs) + -(-columns // chosen.outputs)) * -(-rows * tokens // chosen.rows)
    shape = (chosen.splits, rows, tokens)
    y_SBTO, *hidden = kernel(chosen.kernel, defines, shared_memory=chosen.shared_bytes(adds=added is not None))(
        arrays,
        [*sizes, False],
        grid=(blocks * chosen.threads, chosen.splits, 1),
        threadgroup=(chosen.threads, 1, 1),
        output_shapes=[(*shape, outputs // 2 if is_gated else outputs), *([(*shape, columns)] if weights else [])],
        output_dtypes=[sums, mx.float32] if weights else [sums],
    )
    return y_SBTO, hidden[0] if hidden else None


@cache
def plan(rows: int, inputs: int, outputs: int, columns: int, *, is_whole: bool) -> GemmPlan:
    """The plan that is expected to take the least time: all processors read as much, all at once."""
    if _takes_warpgroups(rows, outputs, is_whole=is_whole):
        return plan_of_warpgroups(rows, inputs, outputs, columns, is_whole=is_whole)
    tiles = 1
    while tiles * ROWS_OF_TILE < rows:
        tiles *= 2
    plans = [
        candidate
        for wide in range(1, MAX_WIDE + 1)
        for splits in (SPLITS[:1] if is_whole else SPLITS)
        if (candidate := _plan(tiles, wide, splits, inputs)) is not None
    ]
    return min(plans, key=lambda candidate: _values_read(candidate, rows, inputs, outputs, columns))


def _takes_warpgroups(rows: int, outputs: int, *, is_whole: bool) -> bool:
    """Whether warpgroups were faster on an H200. Their tiles are large: few rows need many outputs, or parts, to give
    all processors one."""
    if is_whole:
        return rows > 32 or (rows > 16 and outputs >= OUTPUTS_OF_GROUP * PROCESSORS)
    return rows > 8


def _plan(tiles: int, wide: int, splits: int, inputs: int) -> WarpPlan | None:
    for chunk in CHUNKS:
        stages = min(MAX_SHARED_BYTES // _stage_bytes(tiles, wide, chunk), MAX_STAGES)
        if stages < (MIN_STAGES if wide > 1 else MIN_STAGES_OF_NARROW) or -(-inputs // chunk) < splits:
            continue
        deep = 1
        max_deep = chunk // MIN_INPUTS if splits == 1 else MAX_DEEP_OF_PARTS
        while wide * deep * 2 <= MAX_WARPS and deep * 2 <= max_deep:
            deep *= 2
        return WarpPlan(tiles=tiles, wide=wide, deep=deep, chunk=chunk, stages=stages, splits=splits)
    return None


def _values_read(plan: WarpPlan, rows: int, inputs: int, outputs: int, columns: int) -> float:
    """Values that the busiest processor reads, and its share of writing parts of sums."""
    length = -(-inputs // plan.chunk // plan.splits) * plan.chunk
    of_block = (plan.outputs + WEIGHT_OF_ROWS * plan.rows) * length
    return num_waves(plan, rows, outputs, columns) * of_block + parts_written(plan.splits, rows, outputs)


def _stage_bytes(tiles: int, wide: int, chunk: int) -> int:
    return OUTPUTS_OF_WARP * wide * (2 * chunk + 32) + tiles * ROWS_OF_TILE * (2 * chunk + 64)
