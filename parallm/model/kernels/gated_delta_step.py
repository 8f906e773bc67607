"""One token of the gated delta rule (https://arxiv.org/abs/2412.06464) for each row as one CUDA kernel.

A step by MLX's operations is norms, gates, two products with the state and a sum: it reads a row's state three times,
and 32 rows launch as many kernels as one. This one reads the state once and writes it once, and computes all of the
rest meanwhile: norms of queries and keys, gates, and the norm of the outputs. Arithmetic is float32; what the models
round on the way is rounded as there, but for the product of keys and queries.

Axes: B rows, Hk, Hv key and value heads, Dk, Dv head sizes.
"""

from dataclasses import dataclass

import mlx.core as mx

from parallm.model.kernels.columns import Place, place_of
from parallm.model.kernels.cuda import kernel
from parallm.model.kernels.recurrent import has_kernels

THREADS = 256  # of a block, and the most values of a head
LANES = (16, 8, 4)  # threads that share a row of the state: as many as its values allow, four for each
STATE_VALUES = 32  # of a thread's registers
MAX_KEY_VALUES = 16  # of a key in a thread's registers, and as many of a query
DTYPES = (mx.bfloat16, mx.float16, mx.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """Gates of the state, and how much of a value is written."""

    a: mx.array
    """(B, 1, Hv), or (B, 1, Hv, Dk) for a gate per key channel."""
    b: mx.array
    """(B, 1, Hv); sigmoid of it is beta, the share of the value that is written."""
    A_log: mx.array
    """Hv numbers."""
    dt_bias: mx.array
    """A number for each of a row's `a`."""
    lower_bound: float | None
    """None: log g is -exp(A_log) softplus(a + dt_bias); else it is this times sigmoid(exp(A_log) (a + dt_bias))."""
    allow_neg_eigval: bool
    """Whether beta is doubled."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.a, self.b, self.A_log, self.dt_bias

    @property
    def is_by_channel(self) -> bool:
        return self.a.ndim == 4


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitNorm:
    """Queries and keys become their RMS norms times a scale, each rounded to their type."""

    eps: float
    query_scale: float
    key_scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputNorm:
    """The outputs of a head become their RMS norm, times a weight and silu of a gate."""

    weight: mx.array
    """(Dv,)"""
    gate: mx.array
    """(B, 1, Hv, Dv)"""
    eps: float


def fits(
    q_B1KD: mx.array,
    k_B1KD: mx.array,
    v_B1VD: mx.array,
    gates: Gates,
    state_BVDK: mx.array | None,
    output_norm: OutputNorm | None = None,
) -> bool:
    """Whether `gated_delta_step` can compute these on this device."""
    if state_BVDK is None or not has_kernels():
        return False
    (rows, tokens, key_heads, keys), (heads, values) = q_B1KD.shape, v_B1VD.shape[2:]
    normed = (output_norm.weight, output_norm.gate) if output_norm else ()
    lanes = lanes_of(keys)
    return (
        tokens == 1
        and k_B1KD.shape == q_B1KD.shape
        and v_B1VD.shape[:2] == (rows, 1)
        and heads % key_heads == 0
        and state_BVDK.shape == (rows, heads, values, keys)
        and state_BVDK.dtype == mx.float32
        and q_B1KD.dtype in DTYPES
        and all(array.dtype == q_B1KD.dtype for array in (k_B1KD, v_B1VD, *normed))
        and all(array.dtype in DTYPES for array in gates.arrays)
        and lanes is not None
        and keys // lanes <= MAX_KEY_VALUES
        and values <= THREADS
        and gates.b.size == rows * heads
        and gates.A_log.size == heads
        and gates.a.size == rows * gates.dt_bias.size
        and gates.dt_bias.size == heads * (keys if gates.is_by_channel else 1)
        and all(number % 4 == 0 for array in (q_B1KD, k_B1KD) for number in _numbers(place_of(array)))
    )


def gated_delta_step(
    q_B1KD: mx.array,
    k_B1KD: mx.array,
    v_B1VD: mx.array,
    gates: Gates,
    state_BVDK: mx.array,
    *,
    unit_norm: UnitNorm | None = None,
    output_norm: OutputNorm | None = None,
) -> tuple[mx.array, mx.array]:
    """Outputs (B, 1, Hv, Dv) in the type of the queries, and the state (B, Hv, Dv, Dk) after the token.

    The key head of value head h is h // (Hv // Hk). Queries, keys, values and gates may be columns of one product."""
    rows, _, key_heads, keys = q_B1KD.shape
    heads, values = v_B1VD.shape[2:]
    lanes = lanes_of(keys)
    assert lanes is not None, "does not fit"
    passes = -(-values * lanes // THREADS)
    defines = (
        ("T", q_B1KD.dtype),
        ("A", gates.a.dtype),
        ("B", gates.b.dtype),
        ("L", gates.A_log.dtype),
        ("D", gates.dt_bias.dtype),
        ("HK", key_heads),
        ("J", heads // key_heads),
        ("DK", keys),
        ("DV", values),
        ("LANES", lanes),
        ("THREADS", THREADS),
        ("AT_ONCE", max(1, min(passes, STATE_VALUES * lanes // keys))),
        ("NORMALIZED", unit_norm is not None),
        ("BY_CHANNEL", gates.is_by_channel),
        ("BOUNDED", gates.lower_bound is not None),
        ("TWICE", gates.allow_neg_eigval),
        ("GATED", output_norm is not None),
    )
    q, k, v, a, b = (place_of(array) for array in (q_B1KD, k_B1KD, v_B1VD, gates.a, gates.b))
    inputs = [q.whole, k.whole, v.whole, a.whole, b.whole, gates.A_log, gates.dt_bias, state_BVDK]
    scalars: list[int | float] = [number for place in (q, k, v, a, b) for number in _numbers(place)]
    if output_norm is not None:
        z = place_of(output_norm.gate)
        inputs += [z.whole, output_norm.weight]
        scalars += [*_numbers(z), float(output_norm.eps)]
    unit = unit_norm or UnitNorm(eps=0.0, query_scale=1.0, key_scale=1.0)  # not read
    scalars += [float(gates.lower_bound or 0.0), float(unit.eps), float(unit.query_scale), float(unit.key_scale)]
    outputs_B1VD, next_BVDK = kernel("gated_delta_step", defines)(
        inputs,
        scalars,
        grid=(rows * heads * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, 1, heads, values), state_BVDK.shape],
        output_dtypes=[q_B1KD.dtype, mx.float32],
    )
    return outputs_B1VD, next_BVDK


def lanes_of(keys: int) -> int | None:
    """Threads that share a row of `keys` values of the state; None where none divide it."""
    return next((lanes for lanes in LANES if keys % (4 * lanes) == 0), None)


def _numbers(place: Place) -> tuple[int, int]:
    return place.start, place.pitch
