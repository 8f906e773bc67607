"""exp and SwiGLU for float32 on a CPU: a quarter of the time that MLX's take, and a tenth of the error.

MLX's exp for x86 takes one element at a time, 10 ns each; a fifth of a small model's decode step goes there. Here it is
a polynomial of plain additions and products, as in Cephes' expf (https://www.netlib.org/cephes), which compilers turn
into vector instructions: 2.5 ns, relative error 8e-8. Every element is computed alike, whatever is beside it, so engine
and learner get the same bits.

Left out: the softmax of attention. For one row its few elements would cost more in operations than they save.

Elsewhere than on a CPU, and for other types, MLX's own functions are used.
"""

from functools import partial

import mlx.core as mx
from mlx_lm.models.activations import swiglu as mlx_lm_swiglu

LEAST, MOST = -87.3, 88.0
"""Below, float32 has no normal numbers left: 0 is returned. Above, it is that of `MOST`."""
ROUNDING = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, which is in the lowest bits then
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # of few bits, so that products with an integer are exact; the rest
COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
EXPONENT_BITS, EXPONENT_BIAS = 23, 127


def exp(x: mx.array) -> mx.array:
    """e to the power of each element."""
    if not _is_ours(x):
        return mx.exp(x)
    y: mx.array = _exp(x)
    return y


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) x (https://arxiv.org/abs/2002.05202), of the shape of both."""
    if not (_is_ours(gate) and _is_ours(x)):
        plain: mx.array = mlx_lm_swiglu(gate, x)
        return plain
    y: mx.array = _swiglu(gate, x)
    return y


def _is_ours(x: mx.array) -> bool:
    return x.dtype == mx.float32 and mx.default_device() == mx.Device(mx.cpu)


@mx.custom_function  # type: ignore[untyped-decorator]
def _exp(x: mx.array) -> mx.array:
    return _powers(x)


@_exp.vjp  # type: ignore[untyped-decorator]
def _exp_vjp(_: mx.array, cotangent: mx.array, y: mx.array) -> mx.array:
    return cotangent * y


@mx.custom_function  # type: ignore[untyped-decorator]
def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    product: mx.array = _gated(gate, x, _powers(-gate))
    return product


@_swiglu.vjp  # type: ignore[untyped-decorator]
def _swiglu_vjp(primals: tuple[mx.array, mx.array], cotangent: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    gate, x = primals
    gradients: tuple[mx.array, mx.array] = _gated_gradients(gate, x, _powers(-gate), cotangent)
    return gradients


@partial(mx.compile, shapeless=True)
def _gated(gate: mx.array, x: mx.array, powers: mx.array) -> mx.array:
    return gate / (1.0 + powers) * x


@partial(mx.compile, shapeless=True)
def _gated_gradients(gate: mx.array, x: mx.array, powers: mx.array, cotangent: mx.array) -> tuple[mx.array, mx.array]:
    sigmoid = 1.0 / (1.0 + powers)
    scaled = cotangent * sigmoid
    return scaled * x * (1.0 + gate * (1.0 - sigmoid)), scaled * gate


def _powers(x: mx.array) -> mx.array:
    """exp(x) = exp(rest) * 2**n: a polynomial, and an integer written into the exponent of a float."""
    fraction, shifted = _parts(x)
    return fraction * _exponents(shifted.view(mx.int32)).view(mx.float32)


@partial(mx.compile, shapeless=True)
def _parts(x: mx.array) -> tuple[mx.array, mx.array]:
    """exp of what is left of `x` without n ln 2, and n + ROUNDING."""
    clipped = mx.minimum(mx.maximum(x, LEAST), MOST)
    shifted = clipped * LOG2_E + ROUNDING
    n = shifted - ROUNDING
    rest = clipped - n * LN2_HIGH - n * LN2_LOW
    polynomial = rest * COEFFICIENTS[0] + COEFFICIENTS[1]
    for coefficient in COEFFICIENTS[2:]:
        polynomial = polynomial * rest + coefficient
    return mx.where(x < LEAST, 0.0, polynomial * (rest * rest) + rest + 1.0), shifted


@partial(mx.compile, shapeless=True)
def _exponents(shifted_bits: mx.array) -> mx.array:
    """The bits of 2**n as a float."""
    return (shifted_bits + EXPONENT_BIAS) << EXPONENT_BITS
