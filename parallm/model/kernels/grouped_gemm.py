"""Products of rows with the weights of the experts that they are sent to, as one CUDA kernel for tensor cores.

On an H200 MLX's product of 256 rows of 128 experts (2,048 inputs, 768 outputs) takes 573 microseconds, where reading
the weights takes 84, and one of 16,384 rows 650; here they take 101 and 180. A tile holds rows of one expert, wherever
they begin; a small kernel lists the tiles once for all products of a layer. `patches/experts.py` chooses it, where
`patches/kernel_trial.py` has seen it agree with other operations.

Axes: N rows, sorted by expert, M tiles, E experts, I input, O output.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx

from parallm.model.kernels import cuda
from parallm.model.kernels.cuda import architecture, kernel

DTYPES = (mx.bfloat16, mx.float16)
MIN_ROWS = 64
"""mlx-lm does not sort fewer."""
ROWS = 128  # of a tile
DEPTH = 64  # values that are fetched at once
COLUMNS_OF_WARP = 64
MAX_RANK = DEPTH  # of factors whose product is added to another
MAX_EXPERTS = 1024
MAX_EXPERT = 2**31  # values of an expert's weights
UNIT = 8  # widths are a multiple of it
THREADS_OF_TILES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedGemmPlan:
    """The shape of a block."""

    across: int
    """Warps side by side, which compute 64 outputs each; there are two rows of them."""
    stages: int
    blocks: int
    """Blocks of an SM, which bound the registers."""

    @property
    def columns(self) -> int:
        """Outputs of a block."""
        return COLUMNS_OF_WARP * self.across

    @property
    def threads(self) -> int:
        return 64 * self.across

    @property
    def shared_bytes(self) -> int:
        return max(self.stages * (ROWS + self.columns) * DEPTH * 2, ROWS * (self.columns + 8) * 2)


PLAN = GroupedGemmPlan(across=2, stages=3, blocks=2)


class _Use:
    is_off = False


_use = _Use()


def turn_off() -> None:
    """Compute the products of experts by MLX's operations from now on."""
    _use.is_off = True


@contextmanager
def without_kernel() -> Iterator[None]:
    """Inside the block products of experts are computed by MLX's operations."""
    before, _use.is_off = _use.is_off, True
    try:
        yield
    finally:
        _use.is_off = before


def has_kernel() -> bool:
    """Whether the kernel runs on this device, and has not been turned off. Other GPUs than Hopper have not been
    measured."""
    return not _use.is_off and cuda.has_kernels() and architecture() == "sm_90"


def fits(x: mx.array, weights: mx.array) -> bool:
    """Whether the kernel multiplies all rows `x` (.., I) with `weights` (E, O, I) or (E, I, O) on this device."""
    num_experts, *widths = weights.shape
    return (
        x.size >= MIN_ROWS * x.shape[-1]
        and x.dtype == weights.dtype
        and x.dtype in DTYPES
        and all(width % UNIT == 0 for width in widths)
        and num_experts <= MAX_EXPERTS
        and math.prod(widths) < MAX_EXPERT
        and has_kernel()
    )


def fits_plus(hidden: mx.array, factors_ERO: mx.array) -> bool:
    """Whether `grouped_gemm_plus` takes these beside a product that the kernel takes."""
    return hidden.dtype == factors_ERO.dtype and hidden.shape[-1] <= MAX_RANK and fits(hidden, factors_ERO)


def list_tiles(experts_N: mx.array, num_experts: int) -> mx.array:
    """The tiles of the sorted `experts_N`, (M, 4) int32: the expert, its first row of the tile, the tile's rows, 0. The
    number of tiles is the largest that there can be; those that are not needed come last and have no rows."""
    num_rows = experts_N.size
    num_tiles = num_rows // ROWS + min(num_experts, num_rows)
    (tiles_M4,) = kernel("grouped_gemm_tiles", (("ROWS", ROWS),))(
        [mx.stop_gradient(experts_N).astype(mx.uint32)],
        [num_rows, num_experts, num_tiles],
        grid=(THREADS_OF_TILES, 1, 1),
        threadgroup=(THREADS_OF_TILES, 1, 1),
        output_shapes=[(num_tiles, 4)],
        output_dtypes=[mx.int32],
    )
    return tiles_M4


def grouped_gemm(x_NI: mx.array, weights_EOI: mx.array, tiles_M4: mx.array) -> mx.array:
    """The products (N, O) of rows with the weights of their experts, summed in float32; differentiable by the rows.

    `tiles_M4` are `list_tiles` of the rows' experts. The weights are constants: callers leave those that are trained to
    MLX's operations.
    """

    @mx.custom_function  # type: ignore[untyped-decorator]
    def forward(x_NI: mx.array) -> mx.array:
        return _multiply(x_NI, weights_EOI, tiles_M4, transposed=False)

    @forward.vjp  # type: ignore[untyped-decorator]
    def gradient(_: mx.array, cotangent_NO: mx.array, __: mx.array) -> mx.array:
        return _multiply(cotangent_NO, weights_EOI, tiles_M4, transposed=True)

    product_NO: mx.array = forward(x_NI)
    return product_NO


def grouped_factors(x_NI: mx.array, factors_EIO: mx.array, experts_N: mx.array, tiles_M4: mx.array) -> mx.array:
    """The same of factors that are trained: differentiable by them, too, which MLX's operations compute."""

    @mx.custom_function  # type: ignore[untyped-decorator]
    def forward(x_NI: mx.array, factors_EIO: mx.array) -> mx.array:
        return _multiply(x_NI, factors_EIO, tiles_M4, transposed=True)

    @forward.vjp  # type: ignore[untyped-decorator]
    def gradient(primals: tuple[mx.array, mx.array], cotangent_NO: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
        x_NI, factors_EIO = primals
        of_rows = _multiply(cotangent_NO, factors_EIO, tiles_M4, transposed=False)
        return of_rows, _of_factors(x_NI, factors_EIO, experts_N, cotangent_NO)

    product_NO: mx.array = forward(x_NI, factors_EIO)
    return product_NO


def grouped_gemm_plus(
    x_NI: mx.array,
    weights_EOI: mx.array,
    hidden_NR: mx.array,
    factors_ERO: mx.array,
    experts_N: mx.array,
    tiles_M4: mx.array,
) -> mx.array:
    """`grouped_gemm` of `x_NI` and `grouped_factors` of `hidden_NR` in one sum, rounded once."""

    @mx.custom_function  # type: ignore[untyped-decorator]
    def forward(x_NI: mx.array, hidden_NR: mx.array, factors_ERO: mx.array) -> mx.array:
        return _multiply(x_NI, weights_EOI, tiles_M4, transposed=False, plus=(hidden_NR, factors_ERO))

    @forward.vjp  # type: ignore[untyped-decorator]
    def gradient(
        primals: tuple[mx.array, mx.array, mx.array], cotangent_NO: mx.array, _: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        _, hidden_NR, factors_ERO = primals
        return (
            _multiply(cotangent_NO, weights_EOI, tiles_M4, transposed=True),
            _multiply(cotangent_NO, factors_ERO, tiles_M4, transposed=False),
            _of_factors(hidden_NR, factors_ERO, experts_N, cotangent_NO),
        )

    product_NO: mx.array = forward(x_NI, hidden_NR, factors_ERO)
    return product_NO


def _of_factors(x_NI: mx.array, factors_EIO: mx.array, experts_N: mx.array, cotangent_NO: mx.array) -> mx.array:
    """The gradient of the factors."""
    x_N1I = x_NI.reshape(-1, 1, x_NI.shape[1])  # x_NI[:, None] has strides that MLX 0.32's CUDA build misreads

    def gathered(factors_EIO: mx.array) -> mx.array:
        return mx.gather_mm(x_N1I, factors_EIO, rhs_indices=experts_N, sorted_indices=True)

    return mx.vjp(gathered, [factors_EIO], [cotangent_NO.reshape(x_NI.shape[0], 1, -1)])[1][0]


def _multiply(
    rows: mx.array,
    weights_EOI: mx.array,
    tiles_M4: mx.array,
    *,
    transposed: bool,
    plus: tuple[mx.array, mx.array] | None = None,
) -> mx.array:
    """Rows (N, I) to (N, O) by weights (E, O, I), or by (E, I, O) if `transposed`; `plus`, (N, R) and (E, R, O), is
    multiplied and added."""
    num_rows, depth = rows.shape
    outputs = weights_EOI.shape[2 if transposed else 1]
    defines = (
        ("T", rows.dtype),
        ("TRANSPOSED", transposed),
        ("ACROSS", PLAN.across),
        ("STAGES", PLAN.stages),
        ("BLOCKS", PLAN.blocks),
        ("RANK", plus[0].shape[1] if plus else 0),
    )
    num_blocks = tiles_M4.shape[0] * -(-outputs // PLAN.columns)
    (product,) = kernel("grouped_gemm", defines, shared_memory=PLAN.shared_bytes)(
        [rows, weights_EOI, tiles_M4, *(plus or ())],
        [depth, outputs],
        grid=(num_blocks * PLAN.threads, 1, 1),
        threadgroup=(PLAN.threads, 1, 1),
        output_shapes=[(num_rows, outputs)],
        output_dtypes=[rows.dtype],
    )
    return product
