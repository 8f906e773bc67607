"""Compares kernels of recurrent layers, experts and attention with the operations that they stand for, once a process.

The kernels have run on few GPUs, drivers and compilers, and a run would learn from wrong numbers for hours. So small
layers are computed both ways, forward and backward, and a difference turns the kernels off.

Axes: M tokens, B rows, H heads, D head size, C channels, N sorted rows, E experts, I input, O output, R rank.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from parallm.model.kernels import flash_attention, grouped_gemm, recurrent
from parallm.model.kernels.conv_step import conv_step
from parallm.model.kernels.delta_inputs import DeltaLayer, delta_inputs
from parallm.model.kernels.gated_delta_step import Gates, UnitNorm
from parallm.model.kernels.gated_delta_step import gated_delta_step as step_by_kernel
from parallm.model.kernels.gated_norm import gated_norm, plain_gated_norm
from parallm.model.kernels.page_write import PAGE
from parallm.model.recurrence.gated_delta import gated_delta, gated_delta_step
from parallm.model.recurrence.rows import PackedRows, Row, using
from parallm.model.recurrence.short_conv import ShortConv, packed_short_conv, packed_windows, short_conv

ROWS = PackedRows([Row(0, 70), Row(70, 90, after=0), Row(160, 32, after=0)], 192)
NUM_ROWS, HEADS, KEY_HEADS, SIZE = 3, 4, 2, 128
CHANNELS, WIDTH = 64, 4
HALF = mx.bfloat16
EXPERT_ROWS = (0, 150, 1, 0, 70)
EXPERT_INPUTS, EXPERT_OUTPUTS, RANK = 72, 136, 24
PROMPT, COMPLETION, ALONE, PADDING = 150, 70, 40, 10  # tokens that attend
PAGES = (3, 1, 4, 2), (5,)  # of a prompt with its completion, and of another one
MAX_ERROR = 1e-2
"""The largest difference over the largest number of an array. Products of float32 on tensor cores round to TF32, 5e-4
each, and several follow each other; bfloat16 rounds to 2e-3, and attention does so twice, weights and results: 3.9e-3
was the most of 50 packings on an H200. A kernel that computes something else leaves 0.1 and more."""

Arrays = list[mx.array]

logger = logging.getLogger(__name__)


@cache
def try_kernels() -> None:
    """Turn the kernels of recurrent layers off if they do not agree with MLX's operations; a warning says so."""
    if not recurrent.has_kernels():
        return
    trials = ("chunks", _chunks), ("whole chunks", _whole_chunks), ("convolutions", _convolutions), ("layers", _layers)
    for name, trial in (*trials, ("steps", _steps)):
        try:
            found, expected = trial()
            error = max(map(_error, found, expected))
        except Exception as failure:  # noqa: BLE001  # any failure means that the operations are used
            logger.warning("kernels of recurrent layers are off, and hybrids take longer: %s: %s", name, failure)
            recurrent.turn_off()
            return
        if not error <= MAX_ERROR:
            logger.warning(
                "kernels of recurrent layers are off, and hybrids take longer: %s differ by %.1e", name, error
            )
            recurrent.turn_off()
            return


@cache
def try_grouped_gemm(dtype: mx.Dtype) -> None:
    """Turn the kernel of experts' products off if it does not agree with MLX's; a warning says so."""
    if not grouped_gemm.has_kernel():
        return
    if reason := _reason(lambda: _experts(dtype)):
        logger.warning("the kernel of experts' products is off, and mixtures take longer: %s", reason)
        grouped_gemm.turn_off()


@cache
def try_flash_attention(dtype: mx.Dtype, repeats: int, size: int) -> None:
    """Turn attention by warpgroups off if it does not agree with MLX's operations for heads of this size, of which
    `repeats` share keys; a warning says so."""
    if dtype not in flash_attention.DTYPES or flash_attention.forward_kernel(size) != flash_attention.HOPPER:
        return
    if reason := _reason(lambda: _attention(dtype, repeats, size)):
        logger.warning("attention by warpgroups is off, and prompts take longer: %s", reason)
        flash_attention.turn_off_hopper()


def _reason(trial: Callable[[], tuple[Arrays, Arrays]]) -> str:
    """Why a kernel is not used; nothing if it agrees."""
    try:
        found, expected = trial()
        error = max(map(_error, found, expected))
        return "" if error <= MAX_ERROR else f"results differ by {error:.1e}"
    except Exception as failure:  # noqa: BLE001  # any failure means that the operations are used
        return str(failure)


def _error(found: mx.array, expected: mx.array) -> float:
    largest: float = (mx.abs(found - expected).max() / mx.maximum(mx.abs(expected).max(), 1e-6)).item()
    return largest


def _normal(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def _unit(array: mx.array) -> mx.array:
    return array / mx.linalg.norm(array, axis=-1, keepdims=True)


def _with_gradients(function: Callable[..., Arrays], arrays: Arrays) -> Arrays:
    """What a function returns, and the gradients of its inputs."""
    shapes = [array.shape for array in function(*arrays)]
    slopes = [_normal(100 + place, *shape) for place, shape in enumerate(shapes)]
    outputs, gradients = mx.vjp(lambda *given: [one.astype(mx.float32) for one in function(*given)], arrays, slopes)
    mx.eval(outputs, gradients)
    return [array.astype(mx.float32) for array in (*outputs, *gradients)]


def _both_ways(function: Callable[..., Arrays], arrays: Arrays) -> tuple[Arrays, Arrays]:
    """The same with the kernels, and without."""
    found = _with_gradients(function, arrays)
    with recurrent.without_kernels():
        return found, _with_gradients(function, arrays)


def _chunks() -> tuple[Arrays, Arrays]:
    """Packed rows, of which two continue the first, with a gate per channel: kernels for parts of their chunks."""
    return _of_rule(mx.float32, (SIZE,))


def _whole_chunks() -> tuple[Arrays, Arrays]:
    """The same with a gate per head, in 16 bits: kernels for whole chunks."""
    return _of_rule(HALF, ())


def _of_rule(dtype: mx.Dtype, of_channels: tuple[int, ...]) -> tuple[Arrays, Arrays]:
    tokens = ROWS.num_tokens
    q, k = (_unit(_normal(seed, tokens, KEY_HEADS, SIZE)).astype(dtype) for seed in (1, 2))
    v = _normal(3, tokens, HEADS, SIZE).astype(dtype)
    log_a, b = -mx.abs(_normal(5, tokens, HEADS, *of_channels)), mx.sigmoid(_normal(6, tokens, HEADS)).astype(dtype)

    def outputs(q: mx.array, k: mx.array, v: mx.array, log_a: mx.array, b: mx.array) -> Arrays:
        return list(gated_delta(q, k, v, log_a, b, None, ROWS))

    return _both_ways(outputs, [q, k, v, log_a, b])


def _layers() -> tuple[Arrays, Arrays]:
    """What the rule takes of a layer's projections, and the norm of its outputs."""
    x, gates = _normal(26, ROWS.num_tokens, CHANNELS * 3), _normal(27, ROWS.num_tokens, 2)
    weight = _normal(28, CHANNELS * 3, WIDTH, 1)
    layer = DeltaLayer(
        conv_NK1=weight,
        A_log_H=_normal(29, 2),
        dt_bias_H=_normal(30, 2),
        unit_norm=UnitNorm(eps=1e-6, query_scale=0.1, key_scale=0.3),
        key_heads=1,
        key_size=CHANNELS,
        value_size=CHANNELS // 2,
    )
    ones, weights = mx.ones(CHANNELS // 2), _normal(31, ROWS.num_tokens, 2, CHANNELS // 2)

    def joined(q: mx.array, k: mx.array, v: mx.array, log_a: mx.array, b: mx.array, *, is_plain: bool) -> Arrays:
        normed = (plain_gated_norm if is_plain else gated_norm)(v, weights, ones, 1e-6)
        return [q, k, normed, log_a, b]

    def by_kernels(x: mx.array, gates: mx.array) -> Arrays:
        return joined(*delta_inputs(layer, x, gates, gates, packed_windows(ROWS, WIDTH, 0)), is_plain=False)

    def by_operations(x: mx.array, gates: mx.array) -> Arrays:
        convolved = nn.silu(packed_short_conv(x, weight, None, ROWS))
        q, k, v = mx.split(convolved, [CHANNELS, 2 * CHANNELS], axis=1)
        q, k = (mx.fast.rms_norm(one, None, 1e-6)[:, None] for one in (q, k))
        log_a = -mx.exp(layer.A_log_H) * nn.softplus(gates + layer.dt_bias_H)
        v = v.reshape(len(x), 2, -1)
        return joined(0.1 * q, 0.3 * k, v, log_a, mx.sigmoid(gates), is_plain=True)

    found, expected = (_with_gradients(function, [x, gates]) for function in (by_kernels, by_operations))
    return found, expected


def _convolutions() -> tuple[Arrays, Arrays]:
    """Packed rows behind the zeros of their first one."""
    layer = ShortConv(CHANNELS, CHANNELS, WIDTH, groups=CHANNELS, bias=False)
    layer.weight = _normal(7, CHANNELS, WIDTH, 1)
    tokens_1LC = mx.concatenate([mx.zeros((1, WIDTH - 1, CHANNELS)), _normal(8, 1, ROWS.num_tokens, CHANNELS)], axis=1)

    def convolved(tokens: mx.array) -> Arrays:
        with using(ROWS):
            return [layer(tokens)]

    return _both_ways(convolved, [tokens_1LC])


def _steps() -> tuple[Arrays, Arrays]:
    """One token of each row: of the rule, and of a convolution."""
    q, k = (_unit(_normal(seed, NUM_ROWS, 1, KEY_HEADS, SIZE)) for seed in (10, 11))
    v, state = _normal(12, NUM_ROWS, 1, HEADS, SIZE), _normal(13, NUM_ROWS, HEADS, SIZE, SIZE)
    a, b = (_normal(seed, NUM_ROWS, 1, HEADS) for seed in (14, 15))
    A_log, dt_bias = _normal(16, HEADS), _normal(17, HEADS)
    gates = Gates(a=a, b=b, A_log=A_log, dt_bias=dt_bias, lower_bound=None, allow_neg_eigval=False)
    found = step_by_kernel(q, k, v, gates, state)
    decay = mx.exp(-mx.exp(A_log) * mx.logaddexp(a[:, 0] + dt_bias, 0))
    queries, keys = (mx.repeat(one[:, 0], HEADS // KEY_HEADS, axis=1) for one in (q, k))
    outputs, last = gated_delta_step(queries, keys, v[:, 0], decay, mx.sigmoid(b[:, 0]), state)
    x, before = _normal(18, NUM_ROWS, 1, CHANNELS), _normal(19, NUM_ROWS, WIDTH - 1, CHANNELS)
    weight = _normal(20, CHANNELS, WIDTH, 1)
    window = mx.concatenate([before, x], axis=1)
    convolved = conv_step(x, before, weight, None, has_silu=False)
    expected = [outputs[:, None], last, short_conv(window, weight, None), window[:, 1:]]
    return [*found, *convolved], expected


def _experts(dtype: mx.Dtype) -> tuple[Arrays, Arrays]:
    """Products of sorted rows, which begin anywhere, their gradient, and products with LoRA's added."""
    experts_N = mx.array([expert for expert, rows in enumerate(EXPERT_ROWS) for _ in range(rows)], mx.uint32)
    x_NI = _normal(21, experts_N.size, EXPERT_INPUTS).astype(dtype)
    weights_EOI = _normal(22, len(EXPERT_ROWS), EXPERT_OUTPUTS, EXPERT_INPUTS).astype(dtype)
    slopes_NO = _normal(23, experts_N.size, EXPERT_OUTPUTS).astype(dtype)
    tiles_M4 = grouped_gemm.list_tiles(experts_N, len(EXPERT_ROWS))
    products, gradients = mx.vjp(
        lambda x_NI: grouped_gemm.grouped_gemm(x_NI, weights_EOI, tiles_M4), [x_NI], [slopes_NO]
    )

    hidden_NR = _normal(24, experts_N.size, RANK).astype(dtype)
    factors_ERO = _normal(25, len(EXPERT_ROWS), RANK, EXPERT_OUTPUTS).astype(dtype)
    total = grouped_gemm.grouped_gemm_plus(x_NI, weights_EOI, hidden_NR, factors_ERO, experts_N, tiles_M4)
    weights_NOI = weights_EOI.astype(mx.float32)[experts_N]
    factors_NRO = factors_ERO.astype(mx.float32)[experts_N]
    expected = [
        (weights_NOI * x_NI[:, None].astype(mx.float32)).sum(2),
        (weights_NOI * slopes_NO[:, :, None].astype(mx.float32)).sum(1),
    ]
    expected.append(expected[0] + (factors_NRO * hidden_NR[:, :, None].astype(mx.float32)).sum(1))
    return [*products, *gradients, total], expected


def _attention(dtype: mx.Dtype, repeats: int, size: int) -> tuple[Arrays, Arrays]:
    """A prompt, its completion and another prompt: as packed sequences, and the last two also from pages."""
    both = PROMPT + COMPLETION
    used, tokens = both + ALONE, both + ALONE + PADDING
    q, k, v = (
        _normal(seed, tokens, KEY_HEADS * count, size).astype(dtype)
        for seed, count in ((26, repeats), (27, 1), (28, 1))
    )
    sequences = np.array([[0, PROMPT, 0, 0], [PROMPT, COMPLETION, 0, PROMPT], [both, ALONE, 0, 0]])
    packed = flash_attention.PackedSequences(sequences, tokens).attend(q, k, v, scale=size**-0.5)
    first, second = PAGES
    chunks = [(COMPLETION, PROMPT, 0), (ALONE, 0, len(first))]
    tiles_X8 = flash_attention.page_tiles(chunks, tokens - PROMPT, repeats, size)
    keys_PHTD, values_PHTD = (_in_pages([array[:both], array[both:used]], PAGES) for array in (k, v))
    paged = flash_attention.attend_pages(
        q[PROMPT:],
        keys_PHTD,
        values_PHTD,
        mx.array([*first, *second], mx.int32),
        mx.array(tiles_X8.astype(np.int32)),
        scale=size**-0.5,
    )
    parts = [_plain_attention(*(array[start:end] for array in (q, k, v))) for start, end in ((0, both), (both, used))]
    expected = mx.concatenate([*parts, mx.zeros((PADDING, *q.shape[1:]))])
    return [packed, paged], [expected, expected[PROMPT:]]


def _in_pages(sequences: Sequence[mx.array], numbers: Sequence[Sequence[int]]) -> mx.array:
    """Rows (M, H, D) of sequences in the pages of a pool that have these numbers."""
    _, heads, size = sequences[0].shape
    pool = mx.zeros((1 + sum(map(len, numbers)), heads, PAGE, size), sequences[0].dtype)
    for rows, own in zip(sequences, numbers, strict=True):
        whole = mx.concatenate([rows, mx.zeros((len(own) * PAGE - len(rows), heads, size), rows.dtype)])
        pool[mx.array(own)] = whole.reshape(len(own), PAGE, heads, size).swapaxes(1, 2)
    return pool


def _plain_attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Attention of one sequence, in float32."""
    q, k, v = (array.astype(mx.float32).swapaxes(0, 1)[None] for array in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    scores = q @ mx.repeat(k, repeats, axis=1).swapaxes(-1, -2) * q.shape[-1] ** -0.5
    weights = mx.softmax(mx.where(mx.tri(q.shape[2]).astype(mx.bool_), scores, -mx.inf), axis=-1)
    return (weights @ mx.repeat(v, repeats, axis=1))[0].swapaxes(0, 1)
