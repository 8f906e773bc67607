"""Products of few rows with weights of 4 bits, unpacked in registers, as one CUDA kernel for tensor cores.

MLX's product of a few rows takes several times as long as an H200's memory needs for the packed weights. Here they come
as in `small_batch_gemm`, only packed.

Axes: B rows, T tokens, I input, O output, S parts of the input whose sums are still to be added.
"""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import mlx.nn as nn

from parallm.model.kernels.cuda import architecture, has_kernels, kernel

MAX_ROWS = 128
"""More rows multiply faster with unpacked weights."""
BITS = 4
GROUPS = (32, 64, 128)
PAIRS = {mx.bfloat16: ("__nv_bfloat162", 0), mx.float16: ("__half2", 1024)}
"""Two numbers, and the least from which on a number's last bit is 1; 0 where bits alone are numbers."""
UNIT = 128  # inputs that a warp multiplies at once: inputs are a multiple of it
OUTPUTS_OF_TILE = 16
MAX_WIDE = 14
SPLITS = (1, 2, 4)
CHUNKS = (512, 256, 128)
MIN_STAGES, MAX_STAGES = 3, 6
MAX_SHARED_BYTES = 225_000  # of the 227 KB that a block may have
PROCESSORS = 132  # of an H200, each with one block at a time
INPUT_WEIGHT = 0.6
"""What a byte of the input costs beside one of the weights: it comes from the cache."""
SHARED_WEIGHT = 0.16
"""What each warp's reading of a byte of the input from shared memory costs."""
FEW_WARPS = 2.0
"""Warps of a block that would take twice as long as very many: one waits for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedGemmPlan:
    """The shares of the blocks in a product."""

    tiles: int
    """Tiles of 8 rows: a power of two."""
    wide: int
    """Warps side by side."""
    tall: int
    """Tiles of 16 outputs of a warp."""
    deep: int
    """Warps that share each sum."""
    chunk: int
    """Values of the input that are fetched at once."""
    stages: int
    splits: int
    """Parts of the input."""
    group_size: int
    scale_bytes: int
    """Bytes of a row's scales that are fetched at once."""

    @property
    def outputs(self) -> int:
        """Outputs of a block."""
        return OUTPUTS_OF_TILE * self.wide * self.tall

    @property
    def threads(self) -> int:
        return 32 * self.wide * self.deep

    @property
    def span(self) -> int:
        """Chunks that share a fetch of scales."""
        return max(1, self.scale_bytes // 2 * self.group_size // self.chunk)

    @property
    def slots(self) -> int:
        """Places for scales: as many as the chunks that are under way or multiplied can need, a power of two."""
        needed, slots = (self.stages - 2 + self.span) // self.span + 1, 1
        while slots < needed:
            slots *= 2
        return slots

    @property
    def shared_bytes(self) -> int:
        stage = self.outputs * (self.chunk // 2 + 32) + self.tiles * 8 * 2 * self.chunk
        scales = self.slots * 4 * self.outputs * self.span * self.chunk // self.group_size
        sums = (self.deep - 1) * self.wide * self.tall * self.tiles * 512
        return max(self.stages * stage + scales, sums)


def fits(x_BTI: mx.array, layer: nn.Module) -> bool:
    """Whether `quantized_gemm` can compute the quantized `layer` of this input on this device. Other GPUs than
    Hopper have not been measured."""
    if not has_kernels() or not hasattr(layer, "bits") or architecture() != "sm_90":
        return False
    inputs = x_BTI.shape[-1]
    return (
        0 < x_BTI.size <= MAX_ROWS * inputs
        and layer.mode == "affine"
        and layer.bits == BITS
        and layer.group_size in GROUPS
        and x_BTI.dtype == layer.scales.dtype
        and x_BTI.dtype in PAIRS
        and inputs % max(UNIT, 2 * layer.group_size) == 0
        and layer.weight.shape[0] % 8 == 0
    )


def quantized_gemm(x_BTI: mx.array, layer: nn.Module, *, is_whole: bool, is_gated: bool = False) -> mx.array:
    """Outputs (S, B, T, O) of a quantized linear layer, or embedding as the head.

    S is 1, and the type that of the input, if `is_whole`; parts are float32. With `is_gated`, which needs whole
    outputs, these are SwiGLU of their halves, (1, B, T, O / 2): silu of the first by the second. Weights are rounded to
    the input's type, as `unpack_weights` does.
    """
    assert not is_gated or is_whole
    (rows, tokens, inputs), outputs = x_BTI.shape, layer.weight.shape[0]
    chosen = plan(rows * tokens, inputs, outputs, layer.group_size, is_whole=is_whole)
    sums = x_BTI.dtype if chosen.splits == 1 else mx.float32
    pair, magic = PAIRS[x_BTI.dtype]
    defines = (
        ("T", x_BTI.dtype),
        ("Y", sums),
        ("TWO", pair),
        ("MAGIC", magic),
        ("HAS_BIAS", "bias" in layer),
        ("GATED", is_gated),
        ("GROUP", layer.group_size),
        ("TILES", chosen.tiles),
        ("WIDE", chosen.wide),
        ("TALL", chosen.tall),
        ("DEEP", chosen.deep),
        ("CHUNK", chosen.chunk),
        ("STAGES", chosen.stages),
        ("SPLITS", chosen.splits),
        ("SCALE_BYTES", chosen.scale_bytes),
        ("SLOTS", chosen.slots),
    )
    blocks = -(-outputs // chosen.outputs) * chosen.splits
    (y_SBTO,) = kernel("quantized_gemm", defines, shared_memory=chosen.shared_bytes)(
        [x_BTI, layer.weight, layer.scales, layer.biases, *([layer.bias] if "bias" in layer else [])],
        [rows * tokens, inputs, outputs, False],
        grid=(blocks * chosen.threads, 1, 1),
        threadgroup=(chosen.threads, 1, 1),
        output_shapes=[(chosen.splits, rows, tokens, outputs // 2 if is_gated else outputs)],
        output_dtypes=[sums],
    )
    return y_SBTO


def plan(rows: int, inputs: int, outputs: int, group_size: int, *, is_whole: bool) -> QuantizedGemmPlan:
    """The plan that is expected to take the least time: all processors read as much, all at once. Numbers of rows that
    take as many tiles have one plan."""
    tiles = 1
    while tiles * 8 < rows:
        tiles *= 2
    return _plan(tiles, inputs, outputs, group_size, is_whole=is_whole)


@cache
def _plan(tiles: int, inputs: int, outputs: int, group_size: int, *, is_whole: bool) -> QuantizedGemmPlan:
    scale_bytes = next(size for size in (16, 8, 4) if inputs // group_size * 2 % size == 0)
    plans = [
        QuantizedGemmPlan(
            tiles=tiles,
            wide=wide,
            tall=tall,
            deep=_deep(wide, tall * tiles, chunk),
            chunk=chunk,
            stages=stages,
            splits=splits,
            group_size=group_size,
            scale_bytes=scale_bytes,
        )
        for splits in (SPLITS[:1] if is_whole else SPLITS)
        for chunk in CHUNKS
        for tall in (2, 1)
        for wide in range(1, MAX_WIDE + 1)
        for stages in range(MAX_STAGES, MIN_STAGES - 1, -1)
    ]
    possible = [candidate for candidate in plans if is_possible(candidate, inputs)]
    return min(possible, key=lambda candidate: (cost(candidate, inputs, outputs), -candidate.stages))


def _deep(wide: int, sums: int, chunk: int) -> int:
    """As many warps as registers allow and a chunk has work for."""
    deep = 1
    while wide * deep * 2 <= _max_warps(sums) and deep * 2 * UNIT <= chunk:
        deep *= 2
    return deep


def _max_warps(sums: int) -> int:
    """Warps whose registers hold `sums` tiles of 16 outputs of 8 rows, and what they need besides."""
    return 16 if sums <= 8 else 12 if sums <= 16 else 8


def is_possible(plan: QuantizedGemmPlan, inputs: int) -> bool:
    """Whether the plan keeps to what a block may have, and each part of the input fills the stages."""
    chunks = -(-inputs // plan.chunk)
    return (
        plan.wide * plan.deep <= _max_warps(plan.tall * plan.tiles)
        and plan.shared_bytes <= MAX_SHARED_BYTES
        and plan.threads % (plan.chunk // 8) == 0
        and chunks >= plan.splits * (MIN_STAGES if plan.chunk > CHUNKS[-1] else 1)
    )


def cost(plan: QuantizedGemmPlan, inputs: int, outputs: int) -> float:
    """Bytes that the busiest processor reads, and its share of writing and reading parts; more for few warps."""
    blocks = -(-outputs // plan.outputs) * plan.splits
    length = -(-inputs // plan.chunk // plan.splits) * plan.chunk
    weights = plan.outputs * length * (BITS / 8 + 4 / plan.group_size)
    given = plan.tiles * 8 * length * 2
    of_block = weights + given * (INPUT_WEIGHT + SHARED_WEIGHT * plan.wide)
    parts = 0 if plan.splits == 1 else plan.splits * plan.tiles * 8 * outputs * 8 / PROCESSORS
    return (-(-blocks // PROCESSORS) * of_block + parts) * (1 + FEW_WARPS / (plan.wide * plan.deep))
