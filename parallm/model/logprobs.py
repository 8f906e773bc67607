"""Logits -> log-probabilities, for engine and learner alike, so that they cannot differ; and a fast exp for x86-64.

There MLX's loops are not vectorized, 9 nanoseconds a number. Here the polynomial is plain sums and products, and the
power of two is made of the bits of a float: 1.4 nanoseconds (AMD EPYC, 262,144 numbers), with a relative error of
1.2e-7 in place of 9e-7. Each number gets the same bits in any array, compiled or not, as x86-64 has no fused
multiply-add that a compiler could use unasked; other processors keep MLX's functions. Polynomial and the two parts of
ln 2: expf of Cephes (https://www.netlib.org/cephes/).

Axes: N tokens, V vocabulary. All log-probs are float32, after temperature.
"""

import platform
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from parallm.model.kernels.cuda import has_kernels
from parallm.model.kernels.gather import take_in_groups

MIN_FLOAT = float(mx.finfo(mx.float32).min)
MAX_EXPONENT = 88.0
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
MANTISSA_BITS = 23
ROUNDING = 1.5 * 2.0**MANTISSA_BITS + 127
"""Added to a number, it leaves the nearest integer in the lowest bits, and on it the bias of a float's exponent."""

_IS_X86 = platform.machine().lower() in {"x86_64", "amd64"}


@dataclass(frozen=True, slots=True)
class Softmax:
    """The softmax of each row, in parts: log-probs, probabilities and entropies share one pass of exponentials."""

    scaled_NV: mx.array
    """Logits after temperature."""
    exponentials_NV: mx.array
    """exp(scaled - the row's largest)."""
    sums_N: mx.array
    """Sums of the exponentials."""
    logsumexp_N: mx.array

    def of_rows(self, rows_R: mx.array) -> "Softmax":
        """The softmax of some rows, (R,) indices."""
        return Softmax(
            *(array[rows_R] for array in (self.scaled_NV, self.exponentials_NV, self.sums_N, self.logsumexp_N))
        )

    def probabilities(self) -> mx.array:
        """(N, V)."""
        return self.exponentials_NV / self.sums_N[:, None]

    def logprobs(self, tokens_NK: mx.array) -> mx.array:
        """Log-probabilities of `tokens_NK`, (N, K)."""
        if has_kernels():
            chosen_NK = take_in_groups(self.scaled_NV[:, :, None], tokens_NK)[:, :, 0]
        else:
            chosen_NK = mx.take_along_axis(self.scaled_NV, tokens_NK, axis=1)
        return chosen_NK - self.logsumexp_N[:, None]

    def entropies(self) -> mx.array:
        """In nats, (N,). A logit of minus infinity adds nothing."""
        finite_NV = mx.maximum(self.scaled_NV, MIN_FLOAT)  # 0 x -inf would be NaN
        weighted_N = (self.exponentials_NV * finite_NV).sum(axis=-1)
        return self.logsumexp_N - weighted_N / self.sums_N


def softmax_of(logits_NV: mx.array, temperature_N: mx.array) -> Softmax:
    """Softmax of logits divided by the temperature; rows with temperature 0 (greedy) count as temperature 1."""
    divisor_N = mx.where(temperature_N > 0, temperature_N, 1.0).astype(mx.float32)
    scaled_NV = logits_NV.astype(mx.float32) / divisor_N[:, None]
    largest_N1 = scaled_NV.max(axis=-1, keepdims=True)
    exponentials_NV = clipped_exp(scaled_NV - largest_N1)
    sums_N = exponentials_NV.sum(axis=-1)
    return Softmax(scaled_NV, exponentials_NV, sums_N, largest_N1[:, 0] + mx.log(sums_N))


def token_logprobs(logits_NV: mx.array, temperature_N: mx.array, tokens_N: mx.array) -> mx.array:
    """Log-probability of `tokens_N`, (N,)."""
    return softmax_of(logits_NV, temperature_N).logprobs(tokens_N[:, None])[:, 0]


def is_slow(x: mx.array) -> bool:
    """Whether MLX would compute exp of these numbers one by one, and the functions below do not."""
    return _IS_X86 and x.dtype == mx.float32 and mx.default_device() == mx.Device(mx.cpu)


def clipped_exp(x: mx.array) -> mx.array:
    """exp; where `is_slow`, 0 from -88 down, and above 88 that of 88."""
    result: mx.array = _exp(x) if is_slow(x) else mx.exp(x)
    return result


def sigmoid(x: mx.array) -> mx.array:
    """1 / (1 + exp(-x))."""
    result: mx.array = _sigmoid(x) if is_slow(x) else mx.sigmoid(x)
    return result


def softmax(x: mx.array) -> mx.array:
    """Softmax along the last axis."""
    result: mx.array = _softmax(x) if is_slow(x) else mx.softmax(x, axis=-1)
    return result


@mx.custom_function  # type: ignore[untyped-decorator]
def _exp(x: mx.array) -> mx.array:
    clipped = mx.clip(x, -MAX_EXPONENT, MAX_EXPONENT)
    rounded = _rounded(clipped)
    remainder = _remainder(clipped, rounded)
    # 2**n, n in the lowest bits: these become the exponent; -127 gives 0
    power = (rounded.view(mx.int32) << MANTISSA_BITS).view(mx.float32)
    return _completed(remainder, _upper_part(remainder)) * power


@_exp.vjp  # type: ignore[untyped-decorator]
def _exp_vjp(_: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    return cotangent * output


@mx.custom_function  # type: ignore[untyped-decorator]
def _sigmoid(x: mx.array) -> mx.array:
    return _share(_exp(x))


@_sigmoid.vjp  # type: ignore[untyped-decorator]
def _sigmoid_vjp(_: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    return cotangent * output * (1.0 - output)


@mx.custom_function  # type: ignore[untyped-decorator]
def _softmax(x: mx.array) -> mx.array:
    exponentials = _exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


@_softmax.vjp  # type: ignore[untyped-decorator]
def _softmax_vjp(_: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    weighted = cotangent * output
    return weighted - output * weighted.sum(axis=-1, keepdims=True)


# For any shape MLX compiles no more than five operations in a row into one loop: more would take several slow ones.


@partial(mx.compile, shapeless=True)
def _rounded(x: mx.array) -> mx.array:
    return x * LOG2_E + ROUNDING


@partial(mx.compile, shapeless=True)
def _remainder(x: mx.array, rounded: mx.array) -> mx.array:
    """x less the nearest multiple of ln 2."""
    power = rounded - ROUNDING
    return x - power * LN2_HIGH - power * LN2_LOW


@partial(mx.compile, shapeless=True)
def _upper_part(remainder: mx.array) -> mx.array:
    first, second, third, fourth, *_ = COEFFICIENTS
    square = remainder * remainder
    return (remainder * third + fourth + square * (remainder * first + second)) * square


@partial(mx.compile, shapeless=True)
def _completed(remainder: mx.array, upper_part: mx.array) -> mx.array:
    """exp of `remainder`."""
    *_, fifth, sixth = COEFFICIENTS
    return remainder * remainder * (remainder * fifth + sixth + upper_part) + (remainder + 1.0)


@partial(mx.compile, shapeless=True)
def _share(exponential: mx.array) -> mx.array:
    return exponential / (exponential + 1.0)
