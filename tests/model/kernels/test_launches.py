"""Every launch of every Python face agrees with the parameters of its kernel; where NVRTC is, the kernel compiles.

No GPU is needed: a launcher of these tests stands in for MLX's, looks at what it gets, and returns zeros.
"""

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from parallm.model.kernels import (
    add_norm,
    addresses,
    all_sum,
    chunk_gates,
    chunk_scan,
    conv_step,
    copy_into,
    cuda,
    decode_attention,
    delta_chunks,
    delta_inputs,
    flash_attention,
    gated_delta_step,
    gated_norm,
    gather,
    head_norm,
    pack_matrices,
    page_copy,
    paged_attention,
    quantized_gemm,
    rms_norm,
    segmented_lora,
    short_conv,
    slot_copy,
    small_batch_gemm,
    sum_add_norm,
    token_scores,
    unit_lower_inverse,
    wait_until,
)
from parallm.model.kernels.columns import Columns, columns_of, flat_rows, memory_of, place_of, shaped
from parallm.model.kernels.compiler import CompileError, Defines, compile_log, source_of
from parallm.model.kernels.cuda import uploaded
from parallm.model.kernels.decode_attention import RotaryAngles, append_and_attend
from parallm.model.kernels.flash_attention import PackedSequences, attend_pages, page_tiles
from parallm.model.kernels.gather import take_in_groups, take_known_rows, take_rows
from parallm.model.kernels.grouped_gemm import grouped_gemm, grouped_gemm_plus, list_tiles
from parallm.model.kernels.page_write import PAGE, write_pages
from parallm.model.kernels.rotary import Rotation, rotated
from parallm.model.kernels.segmented_lora import GroupOutput, ShrinkOutput, shrink
from parallm.model.kernels.swiglu import fused_swiglu, swiglu_of_halves
from parallm.model.kernels.token_draw import draw_tokens, score_tokens
from parallm.model.kernels.token_filter import ends_by_kernel, weights_by_kernel
from parallm.model.kernels.unpack import unpack_weights
from parallm.model.logprobs import softmax_of
from parallm.model.lora.segmented import add_products, order_rows
from parallm.model.recurrence.gated_delta import gated_delta_by_kernels
from parallm.model.recurrence.rows import PackedRows, Row
from tests.model.kernels.test_compiler import NAMES, needs_nvrtc
from tests.model.lora.test_segmented import random_versions

TYPES = {
    "const float*": mx.float32,
    "const float4*": mx.float32,
    "const int*": mx.int32,
    "const int4*": mx.int32,
    "const uint32_t*": mx.uint32,
    "const uint64_t*": mx.uint64,
    "float*": mx.float32,
    "int*": mx.int32,
    "int4*": mx.int32,
    "uint64_t*": mx.uint64,
}
SCALARS = {"int": int, "float": float, "bool": bool}


@dataclass(frozen=True, slots=True)
class Launch:
    name: str
    defines: Defines
    inputs: list[mx.array]
    scalars: list[Any]
    outputs: list[mx.Dtype]
    shared_memory: int


def parameters(name: str, defines: Defines) -> list[tuple[str, str]]:
    """Type and name of each parameter of a kernel that is compiled with these macros."""
    macros = dict(defines)
    head = re.search(
        r'extern "C" __global__ void\s+(?:__launch_bounds__\(.+?\)\s+)?\w+\((.*?)\) {\n', source_of(name, defines), re.S
    )
    assert head is not None
    lines, kept = [], [True]
    for line in head[1].splitlines():
        match line.split():
            case ["#if", condition]:
                kept.append(bool(macros[condition]))
            case ["#else"]:
                kept.append(not kept.pop())
            case ["#endif"]:
                kept.pop()
            case _ if all(kept):
                lines.append(re.sub(r"\bPOINTERS\b", str(macros.get("POINTERS")), line))
    split = [parameter.rsplit(maxsplit=1) for parameter in "".join(lines).split(",")]
    return [(" ".join(kind.split()), parameter) for kind, parameter in split]


def mistakes(launch: Launch) -> list[str]:
    """What a kernel would misunderstand."""
    macros = dict(launch.defines)
    given = [("const", array.dtype) for array in launch.inputs] + [("", dtype) for dtype in launch.outputs]
    wanted = parameters(launch.name, launch.defines)
    if len(wanted) != len(given) + len(launch.scalars):
        return [
            f"{launch.name} takes {len(wanted)} arguments, not {len(given)} arrays and {len(launch.scalars)} scalars"
        ]
    found = []
    for (kind, parameter), (access, dtype) in zip(wanted, given, strict=False):
        expected = macros.get(kind.removeprefix("const ").rstrip("*"), TYPES.get(kind))
        is_unread = kind == "const void*" or (parameter == "angles" and not macros.get("DIMS"))
        if kind.startswith("const") != (access == "const") or (str(expected) != str(dtype) and not is_unread):
            found.append(f"{launch.name}: {kind} {parameter} gets {access} {dtype}")
    for (kind, parameter), scalar in zip(wanted[len(given) :], launch.scalars, strict=True):
        if type(scalar) is not SCALARS.get(kind):
            found.append(f"{launch.name}: {kind} {parameter} gets {scalar!r}")
    return found


Face = Callable[[mx.Dtype], Any]


def attend(
    dtype: mx.Dtype,
    *,
    rows: int = 3,
    positions: int = 1024,
    beside: bool = False,
    rotation: Rotation | None = None,
) -> None:
    heads, pools = mx.zeros((rows, 1, 8 * 64), dtype), [mx.zeros((rows + 1, 2, positions, 64), dtype)] * 2
    queries, keys, values = columns_of(heads, [256, 128, 128])
    arrays = [part.reshape(rows, 1, -1, 64).transpose(0, 2, 1, 3) for part in (queries, keys, values)]
    if not beside:
        arrays = [mx.array(array) for array in arrays]
    numbers = mx.arange(rows)
    rotary = RotaryAngles(angles=rotation.angles(numbers), traditional=rotation.traditional) if rotation else None
    q, k, v = arrays
    lengths = numbers % positions
    append_and_attend(q, k, v, pools[0], pools[1], numbers, lengths, scale=0.125, window=3, rotary=rotary)


def attend_pages_of_rows(
    dtype: mx.Dtype, *, heads: int = 4, size: int = 64, rotation: Rotation | None = None, has_sinks: bool = False
) -> None:
    """A step of three rows, whose queries, keys and values are columns of one product."""
    half = mx.bfloat16 if dtype == mx.float32 else dtype
    numbers, tables, pool = mx.arange(3), mx.zeros((3, 4), mx.int32), mx.zeros((9, 2, PAGE, size), half)
    columns = columns_of(mx.zeros((3, 1, (heads + 4) * size), half), [heads * size, 2 * size, 2 * size])
    q, k, v = (part.reshape(3, 1, -1, size).transpose(0, 2, 1, 3) for part in columns)
    assert paged_attention.fits(q, pool, pool)
    plan = paged_attention.plan_pages(tables, numbers, query_heads=heads, key_heads=2, head_size=size, window=70)
    rotary = RotaryAngles(angles=rotation.angles(numbers), traditional=rotation.traditional) if rotation else None
    sinks = mx.zeros(heads) if has_sinks else None
    paged_attention.append_and_attend(q, k, v, pool, pool, plan, scale=0.125, rotary=rotary, sinks_Q=sinks)


def rotate(dtype: mx.Dtype, rotation: Rotation) -> None:
    heads, angles = mx.zeros((5, 4, 64), dtype), rotation.angles(mx.arange(5))
    mx.vjp(lambda given: rotated(given, angles, rotation), [heads], [heads])


def swiglu(dtype: mx.Dtype) -> None:
    x = mx.zeros((4, 64), dtype)
    mx.vjp(fused_swiglu, [x, x], [x])
    mx.vjp(swiglu_of_halves, [x], [x[:, :32]])
    swiglu_of_halves(x[:, None], has_gradient=False)


def score(dtype: mx.Dtype, entropy: mx.array | None) -> None:
    scores = token_scores.token_scores(mx.zeros((3, 500), dtype), mx.ones(3), mx.array([1, 2, 3]))
    scores.gradient(mx.ones(3), entropy)


def draw(dtype: mx.Dtype, *, vocabulary: int) -> None:
    logits, temperatures = mx.zeros((3, vocabulary), dtype), mx.ones(3)
    draw_tokens(logits, temperatures, None)
    draw_tokens(logits, temperatures, mx.zeros((3, 2)))
    score_tokens(logits, temperatures, mx.zeros(3, mx.int32))


def upload(_: mx.Dtype) -> None:
    uploaded(np.zeros(300, np.int32))
    uploaded(np.zeros(300, np.float32))


def filter_tokens(dtype: mx.Dtype) -> None:
    softmax, limits_R = softmax_of(mx.zeros((3, 500), dtype), mx.ones(3)), mx.ones(3, mx.uint64)
    weights_by_kernel(softmax, *ends_by_kernel(softmax, limits_R, limits_R), mx.ones(3))


def attend_by_warpgroups(dtype: mx.Dtype, size: int, repeats: int = 2) -> None:
    """Prompts that are packed, and in pages."""
    half = mx.bfloat16 if dtype == mx.float32 else dtype
    q, kv, pool = (mx.zeros(shape, half) for shape in ((200, 2 * repeats, size), (200, 2, size), (3, 2, PAGE, size)))
    with patch.object(flash_attention, "forward_kernel", lambda _: flash_attention.HOPPER):
        PackedSequences(np.array([[0, 200, 0, 0]]), 200).attend(q, kv, kv, scale=0.125)
        tiles = mx.array(page_tiles([(100, 0, 0), (90, 64, 2)], 200, repeats, size).astype(np.int32))
        attend_pages(q, pool, pool, mx.zeros(8, mx.int32), tiles, scale=0.125)


def attend_packed(dtype: mx.Dtype) -> None:
    """A prompt of many tiles with two completions; one of its kernels sums parts, and all of them have a gradient."""
    half = mx.bfloat16 if dtype == mx.float32 else dtype
    sequences = np.array([[0, 2000, 0, 0], *[[2000 + 500 * row, 500, 0, 2000] for row in range(8)]])
    q, kv = mx.zeros((6016, 4, 64), half), mx.zeros((6016, 2, 64), half)
    layout = PackedSequences(sequences, 6016)
    mx.vjp(lambda q, k, v: [layout.attend(q, k, v, scale=0.125)], [q, kv, kv], [q])


def take(dtype: mx.Dtype) -> None:
    x, odd = mx.zeros((4, 64), dtype), mx.zeros((4, 3), dtype)
    take_rows(x, mx.zeros((2, 3), mx.uint32))
    take_in_groups(odd[:, :, None], mx.zeros((4, 2), mx.int64))
    mx.vjp(lambda given: take_known_rows(given, np.array([1, 1, 3], np.int32)), [x], [x[:3]])


def unpack(dtype: mx.Dtype) -> None:
    for bits in (4, 8):
        unpack_weights(*mx.quantize(mx.zeros((4, 64), dtype), bits=bits), group_size=64, bits=bits)


def prefill(dtype: mx.Dtype, rotation: Rotation | None = None) -> None:
    """Tokens of two prompts are written into pages, and attend to them."""
    half = mx.bfloat16 if dtype == mx.float32 else dtype
    heads, pool = mx.zeros((100, 1, 8 * 64), half), mx.zeros((4, 2, PAGE, 64), half)
    rotary = None
    if rotation:
        rotary = RotaryAngles(angles=rotation.angles(mx.arange(100)), traditional=rotation.traditional)
    heads_M = [part.reshape(100, 1, -1, 64).transpose(0, 2, 1, 3) for part in columns_of(heads, [256, 128, 128])]
    turned = write_pages(heads_M, pool, pool, mx.arange(100), rotary)
    tiles = mx.array(page_tiles([(60, 0, 0), (30, 64, 1)], 100, 2, 64).astype(np.int32))
    attend_pages(turned, pool, pool, mx.array([1, 2, 3], mx.int32), tiles, scale=0.125)


def normalize(dtype: mx.Dtype, *, size: int, splits: int, versions: int = 0, next_ranks: tuple[int, ...] = ()) -> None:
    half = mx.bfloat16 if dtype == mx.float32 else dtype
    stream = mx.zeros((5, 1, size), half)
    parts = mx.zeros((splits, 5, 1, size), half if splits == 1 else mx.float32) if splits else None
    lora = None
    if versions:
        rank, order = add_norm.MAX_FACTORS // size, order_rows([0] * 5, versions)
        weights = random_versions(64, [size], [rank], versions, half).weights
        lora = ShrinkOutput(weights=weights, order_B2=order, hidden_PBTK=mx.zeros((2, 5, 1, versions * rank)))
    assert add_norm.fits(parts, stream, lora)
    following = None
    if next_ranks:
        following = (
            random_versions(size, [64] * len(next_ranks), list(next_ranks), 1, half).weights,
            order_rows([0] * 5, 1),
        )
    add_norm.add_norm(parts, stream, mx.ones(size, half), 1e-5, lora=lora, following=following)


def convolve(dtype: mx.Dtype, *, channels: int, has_bias: bool) -> None:
    """Of the newest token of three rows, which is a part of a product's columns."""
    x = columns_of(mx.zeros((3, 1, channels + 64), dtype), [channels, 64])[0]
    state, weight, bias = (
        mx.zeros((3, 3, channels), dtype),
        mx.zeros((channels, 4, 1), dtype),
        mx.zeros(channels, dtype),
    )
    assert conv_step.fits(x, state, weight, bias)
    conv_step.conv_step(x, state, weight, bias if has_bias else None, has_silu=not has_bias)


def convolve_tokens(dtype: mx.Dtype, *, has_bias: bool) -> None:
    x, weight, bias = mx.zeros((9, 48), dtype), mx.zeros((48, 4, 1), dtype), mx.zeros(48, dtype) if has_bias else None
    assert short_conv.fits(x, weight, bias)
    windows = short_conv.windows_of(np.zeros((9, 4), np.int32), 9)
    mx.vjp(lambda x: short_conv.short_conv(x, weight, bias, windows), [x], [x])


def update_states(dtype: mx.Dtype, *, size: int, is_by_channel: bool = False, is_normed: bool = True) -> None:
    columns = columns_of(mx.zeros((3, 1, 8 * size), dtype), [2 * size, 2 * size, 4 * size])
    q, k, v = (part.reshape(3, 1, -1, size) for part in columns)
    of_channels = (size,) if is_by_channel else ()
    gates = gated_delta_step.Gates(
        a=mx.zeros((3, 1, 4, *of_channels), dtype),
        b=mx.zeros((3, 1, 4), dtype),
        A_log=mx.zeros(4),
        dt_bias=mx.zeros((4, *of_channels), dtype),
        lower_bound=-5.0 if is_by_channel else None,
        allow_neg_eigval=not is_normed,
    )
    norm = gated_delta_step.OutputNorm(weight=mx.zeros(size, dtype), gate=v, eps=1e-6) if is_normed else None
    unit = gated_delta_step.UnitNorm(eps=1e-6, query_scale=0.01, key_scale=0.1) if is_normed else None
    state = mx.zeros((3, 4, size, size))
    assert gated_delta_step.fits(q, k, v, gates, state, norm)
    gated_delta_step.gated_delta_step(q, k, v, gates, state, unit_norm=unit, output_norm=norm)


def normalize_heads(dtype: mx.Dtype) -> None:
    half = mx.bfloat16 if dtype == mx.float32 else dtype
    _, keys_B1XD, _ = columns_of(mx.zeros((5, 1, 1152), half), [896, 128, 128])
    heads, weight = keys_B1XD.reshape(5, 1, 2, 64), mx.zeros(64, half)
    assert head_norm.fits(heads, weight)
    head_norm.head_norm(heads, weight, 1e-6)


def gate_and_normalize(dtype: mx.Dtype) -> None:
    heads, weight = mx.zeros((3, 5, 2, 128), dtype), mx.zeros(128, dtype)
    assert gated_norm.fits(heads, heads, weight)
    mx.vjp(lambda x, gate: gated_norm.gated_norm(x, gate, weight, 1e-6), [heads, heads], [heads])


def normalize_rows(dtype: mx.Dtype, *, size: int) -> None:
    x, weight = mx.zeros((3, 2, size), dtype), mx.zeros(size, dtype)
    assert rms_norm.fits(x, weight)
    mx.vjp(lambda x: rms_norm.rms_norm(x, weight, 1e-5), [x], [x])


def mix_chunks(dtype: mx.Dtype, *, size: int = 128, heads: tuple[int, int] = (2, 4), rows: int = 3) -> None:
    """Rows of which one continues another, forward and backward; float32 with smaller heads."""
    size = 64 if dtype == mx.float32 else size
    packed = PackedRows([*(Row(row * 70, 70) for row in range(rows)), Row(rows * 70, 9, after=0)], rows * 70 + 16)
    tokens = packed.num_tokens
    q, v, b = mx.zeros((tokens, heads[0], size), dtype), mx.zeros((tokens, heads[1], size), dtype), mx.zeros(1)
    inputs = [q, q, v, mx.zeros((tokens, heads[1])), mx.broadcast_to(b.astype(dtype), (tokens, heads[1]))]
    assert delta_chunks.fits(inputs, delta_chunks.CHUNK)
    chunks = packed.chunks(delta_chunks.CHUNK)
    last = mx.zeros((rows, heads[1], size, size))
    mx.vjp(lambda *given: list(gated_delta_by_kernels(given, None, chunks)), inputs, [v, last])


def project(dtype: mx.Dtype) -> None:
    """What a layer of Qwen3.5 takes of its projections."""
    layer = delta_inputs.DeltaLayer(
        conv_NK1=mx.zeros((2 * 2 * 128 + 4 * 64, 4, 1), dtype),
        A_log_H=mx.zeros(4),
        dt_bias_H=mx.zeros(4, dtype),
        unit_norm=gated_delta_step.UnitNorm(eps=1e-6, query_scale=0.01, key_scale=0.1),
        key_heads=2,
        key_size=128,
        value_size=64,
    )
    assert delta_inputs.fits(layer, None, dtype)
    x, a, windows = (
        mx.zeros((9, 768), dtype),
        mx.zeros((9, 4), dtype),
        short_conv.windows_of(np.zeros((9, 4), np.int32), 9),
    )
    slopes = [mx.zeros((9, 2, 128), dtype)] * 2 + [mx.zeros((9, 4, 64), dtype), mx.zeros((9, 4)), a]
    mx.vjp(lambda x, a, b: list(delta_inputs.delta_inputs(layer, x, a, b, windows)), [x, a, a], slopes)


def gate_chunks(size: int) -> None:
    log_a = mx.zeros((3, 5, size, 1))
    assert chunk_gates.fits(log_a)
    mx.vjp(lambda log_a: list(chunk_gates.chunk_gates(log_a)), [log_a], [log_a, log_a, mx.zeros((3, 5, size, size))])


def invert(size: int) -> None:
    products = mx.zeros((3, 5, size, size))
    assert unit_lower_inverse.fits(products)
    unit_lower_inverse.unit_lower_inverse(products)


def scan(*, size: int = 64, head: int = 128, is_by_channel: bool = False) -> None:
    values, keys = (mx.zeros((9, 2, size, head)) for _ in range(2))
    decay, states = mx.zeros((9, 2, 1, head if is_by_channel else 1)), mx.zeros((4, 2, head, head))
    assert chunk_scan.fits(values, keys)
    for more in (None, mx.zeros((9, 2, head, head))):
        chunk_scan.chunk_scan(values, keys, keys, decay, states, (4, 4, 1), 0, more_NHVK=more)


def pack(dtype: mx.Dtype) -> None:
    a = pack_matrices.Matrix(array=mx.zeros((16, 8)), is_transposed=True, rank=8, factor=1.0)
    b = pack_matrices.Matrix(array=mx.zeros((8, 24)), is_transposed=False, rank=8, factor=2.0)
    pack_matrices.pack_matrices([a, b], dtype)


def copy(dtype: mx.Dtype) -> None:
    prompts, pools = [mx.zeros((2, 2, 16, 64), dtype)] * 3, [mx.zeros((4, 2, 32, 64), dtype)] * 3
    slot_copy.copy_to_slots(prompts, pools, rows=[0, 1], slots=[2, 3], lengths=[16, 5])
    slot_copy.copy_out(pools, 1, 3, 9)
    slot_copy.copy_out(pools[:1], 1, 3, 9)
    page_copy.copy_pages(pools, [1, 1], [2, 3])


def multiply(dtype: mx.Dtype, *, versions: int, widths: list[int], bias: bool, rows: int = 9) -> None:
    """As a layer does: the product, LoRA with it or after it, and all ways to read the outputs."""
    half = mx.bfloat16 if dtype == mx.float32 else dtype
    linear = nn.Linear(512, sum(widths), bias=bias)
    linear.set_dtype(half)
    x, ranks = mx.zeros((rows, 1, 512), half), [16] * len(widths)
    weights = random_versions(512, widths, ranks, versions, half).weights if versions else None
    y_SBTO, hidden = small_batch_gemm.small_batch_gemm(x, linear, weights, is_whole=len(widths) > 1)
    if len(widths) == 2:
        small_batch_gemm.small_batch_gemm(x, linear, None, is_whole=True, is_gated=True)
    if weights is not None and versions == 1 and len(widths) > 1:
        added = small_batch_gemm.ShrunkRows(weights=weights, shrunk_BK=mx.zeros((rows, sum(ranks)), half))
        for is_gated in {False, len(widths) == 2}:
            small_batch_gemm.small_batch_gemm(x, linear, None, is_whole=True, is_gated=is_gated, added=added)
    lora = None
    if weights is not None:
        hidden = shrink(x, weights, order_rows([0] * rows, versions)) if hidden is None else hidden
        lora = ShrinkOutput(weights=weights, order_B2=order_rows([0] * rows, versions), hidden_PBTK=hidden)
    output = GroupOutput(y_SBTO, half, widths, lora)
    output.split()
    if len(widths) == 2:
        output.gated()
    if len(widths) == 1:
        output.added_to(mx.zeros((rows, 1, widths[0]), half))


def multiply_tokens(dtype: mx.Dtype, *, widths: list[int]) -> None:
    """LoRA of many tokens of one version."""
    half = mx.bfloat16 if dtype == mx.float32 else dtype
    weights = random_versions(512, widths, [16] * len(widths), 1, half).weights
    add_products(weights, mx.zeros((256, 1, sum(widths)), half), mx.zeros((256, 1, 512), half), mx.zeros(256, mx.int32))


def multiply_packed(dtype: mx.Dtype, *, rows: int, outputs: int = 4096, bias: bool = False, group: int = 64) -> None:
    half = mx.bfloat16 if dtype == mx.float32 else dtype
    linear = nn.Linear(512, outputs, bias=bias)
    linear.set_dtype(half)
    layer = nn.QuantizedLinear.from_linear(linear, group_size=group, bits=4)
    x = mx.zeros((rows, 1, 512), half)
    quantized_gemm.quantized_gemm(x, layer, is_whole=False)
    quantized_gemm.quantized_gemm(x, layer, is_whole=True, is_gated=True)


def multiply_experts(dtype: mx.Dtype) -> None:
    half = mx.bfloat16 if dtype == mx.float32 else dtype
    x, weights = mx.zeros((2000, 64), half), mx.zeros((4, 96, 64), half)
    tiles = list_tiles(mx.zeros(2000, mx.uint32), 4)
    mx.vjp(lambda x: grouped_gemm(x, weights, tiles), [x], [mx.zeros((2000, 96), half)])
    for rank in (8, 64):
        hidden, factors = mx.zeros((2000, rank), half), mx.zeros((4, rank, 96), half)
        grouped_gemm_plus(x, weights, hidden, factors, mx.zeros(2000, mx.uint32), tiles)


def sum_over_ranks(dtype: mx.Dtype) -> None:
    for size in (2, 4):
        all_sum.all_sum(mx.zeros((3, 1, 512), dtype), peers_of(size))


def add_norm_over_ranks(dtype: mx.Dtype, *, size: int, splits: int, ranks: int) -> None:
    half = mx.bfloat16 if dtype == mx.float32 else dtype
    parts, output = mx.zeros((splits, 5, 1, size), half if splits == 1 else mx.float32), mx.zeros((5, 1, size), half)
    assert sum_add_norm.fits(parts, output)
    sum_add_norm.sum_add_norm(parts, mx.zeros(output.shape), mx.ones(size, half), 1e-5, peers=peers_of(ranks))


def peers_of(size: int) -> all_sum.PeerMemory:
    return all_sum.PeerMemory(rank=size - 1, size=size, addresses=mx.zeros(8, mx.uint64))


HALVES = Rotation(dims=64, traditional=False, scale=1.0, base=10_000.0, wavelengths=None)
FIRST_HALF = Rotation(dims=32, traditional=False, scale=1.0, base=10_000.0, wavelengths=None)
NEIGHBOURS = Rotation(dims=64, traditional=True, scale=0.5, base=None, wavelengths=mx.ones(32))
FACES: dict[str, Face] = {
    "attend": attend,
    "attend, columns of a product": lambda dtype: attend(dtype, beside=True),
    "attend, rows in parts": lambda dtype: attend(dtype, rows=1, positions=4096),
    "attend, whole rows": lambda dtype: attend(dtype, rows=500, positions=64),
    "attend, halves rotated": lambda dtype: attend(dtype, rotation=HALVES),
    "attend, a first half rotated": lambda dtype: attend(dtype, rotation=FIRST_HALF),
    "attend, neighbours rotated": lambda dtype: attend(dtype, rows=500, positions=64, rotation=NEIGHBOURS),
    "attend to pages": attend_pages_of_rows,
    "attend to pages, halves rotated": lambda dtype: attend_pages_of_rows(dtype, rotation=HALVES),
    "attend to pages, a first half rotated": lambda dtype: attend_pages_of_rows(dtype, rotation=FIRST_HALF),
    "attend to pages, neighbours rotated": lambda dtype: attend_pages_of_rows(dtype, rotation=NEIGHBOURS),
    "attend to pages, many queries, sinks": lambda dtype: attend_pages_of_rows(dtype, heads=48, has_sinks=True),
    "attend to pages, large heads": lambda dtype: attend_pages_of_rows(dtype, heads=16, size=256),
    "rotate halves": lambda dtype: rotate(dtype, HALVES),
    "rotate a first half": lambda dtype: rotate(dtype, FIRST_HALF),
    "rotate neighbours": lambda dtype: rotate(dtype, NEIGHBOURS),
    "swiglu": swiglu,
    "score": lambda dtype: score(dtype, None),
    "score with entropies": lambda dtype: score(dtype, mx.ones(3)),
    "attend to packed rows": attend_packed,
    "attend by warpgroups": lambda dtype: attend_by_warpgroups(dtype, 64),
    "attend by warpgroups, a key for each query": lambda dtype: attend_by_warpgroups(dtype, 64, repeats=1),
    "attend by warpgroups, large heads": lambda dtype: attend_by_warpgroups(dtype, 128),
    "upload": upload,
    "draw": lambda dtype: draw(dtype, vocabulary=500),
    "draw from a vocabulary of whole vectors": lambda dtype: draw(dtype, vocabulary=128_256),
    "filter": filter_tokens,
    "prefill": prefill,
    "prefill, halves rotated": lambda dtype: prefill(dtype, HALVES),
    "prefill, a first half rotated": lambda dtype: prefill(dtype, FIRST_HALF),
    "prefill, neighbours rotated": lambda dtype: prefill(dtype, NEIGHBOURS),
    "normalize rows": lambda dtype: normalize_rows(dtype, size=896),
    "normalize long rows": lambda dtype: normalize_rows(dtype, size=4096),
    "add and normalize": lambda dtype: normalize(dtype, size=4096, splits=1),
    "add parts and normalize": lambda dtype: normalize(dtype, size=896, splits=4),
    "add and normalize, many chunks": lambda dtype: normalize(dtype, size=8192, splits=2),
    "add parts and LoRA and normalize": lambda dtype: normalize(dtype, size=4096, splits=4, versions=1),
    "add parts, normalize and multiply by A": lambda dtype: normalize(
        dtype, size=1024, splits=4, versions=1, next_ranks=(16, 16, 16)
    ),
    "add, normalize and multiply by A": lambda dtype: normalize(dtype, size=2048, splits=1, next_ranks=(8, 24)),
    "add and normalize, LoRA of versions": lambda dtype: normalize(dtype, size=8192, splits=1, versions=2),
    "convolve": lambda dtype: convolve(dtype, channels=6144, has_bias=False),
    "convolve, biased": lambda dtype: convolve(dtype, channels=48, has_bias=True),
    "convolve tokens": lambda dtype: convolve_tokens(dtype, has_bias=False),
    "convolve tokens, biased": lambda dtype: convolve_tokens(dtype, has_bias=True),
    "update states": lambda dtype: update_states(dtype, size=128),
    "update states, many values": lambda dtype: update_states(dtype, size=256),
    "update states, a gate per channel": lambda dtype: update_states(dtype, size=128, is_by_channel=True),
    "update small states": lambda dtype: update_states(dtype, size=16, is_normed=False),
    "gate and normalize": gate_and_normalize,
    "gates of chunks": lambda _: gate_chunks(64),
    "gates of small chunks": lambda _: gate_chunks(16),
    "invert": lambda _: invert(64),
    "invert small matrices": lambda _: invert(16),
    "scan": lambda _: scan(),
    "scan with gates per channel": lambda _: scan(size=16, is_by_channel=True),
    "scan large heads": lambda _: scan(head=256),
    "mix chunks": mix_chunks,
    "mix chunks of many rows": lambda dtype: mix_chunks(dtype, heads=(8, 8), rows=24),
    "project": project,
    "copy": copy,
    "copy into": lambda dtype: copy_into.copy_into([mx.zeros(6, dtype)] * 3, [mx.zeros((3, 2), dtype)] * 3),
    "pack matrices": pack,
    "wait": lambda _: wait_until.wait_until(1 << 40, (1 << 32) - 1),
    "addresses": lambda dtype: addresses.addresses([mx.zeros(3, dtype), mx.zeros(1, mx.int32)]),
    "normalize heads": normalize_heads,
    "normalize without parts": lambda dtype: normalize(dtype, size=896, splits=0, next_ranks=(16, 16, 16)),
    "sum over ranks": sum_over_ranks,
    "sum over ranks and normalize": lambda dtype: add_norm_over_ranks(dtype, size=8192, splits=4, ranks=2),
    "sum over many ranks and normalize": lambda dtype: add_norm_over_ranks(dtype, size=1280, splits=1, ranks=8),
    "take": take,
    "unpack": unpack,
    "multiply experts' rows": multiply_experts,
    "multiply tokens by A and join B": lambda dtype: multiply_tokens(dtype, widths=[64, 32, 32]),
    "multiply packed": lambda dtype: multiply_packed(dtype, rows=1),
    "multiply packed, small groups": lambda dtype: multiply_packed(dtype, rows=32, outputs=28672, group=32),
    "multiply packed, biased": lambda dtype: multiply_packed(dtype, rows=64, outputs=6144, bias=True),
    "multiply packed, many rows": lambda dtype: multiply_packed(dtype, rows=128, outputs=28672, group=128),
    "multiply packed, blocks of rows": lambda dtype: multiply_packed(dtype, rows=255),
    "multiply": lambda dtype: multiply(dtype, versions=0, widths=[64, 32, 32], bias=False),
    "multiply, biased": lambda dtype: multiply(dtype, versions=0, widths=[64, 64], bias=True),
    "multiply, alone": lambda dtype: multiply(dtype, versions=0, widths=[4096], bias=False),
    "multiply with one version": lambda dtype: multiply(dtype, versions=1, widths=[64, 32, 32], bias=True),
    "multiply many rows with one version": lambda dtype: multiply(
        dtype, versions=1, widths=[4864, 4864], bias=False, rows=128
    ),
    "multiply many rows, biased": lambda dtype: multiply(
        dtype, versions=1, widths=[896, 128, 128], bias=True, rows=300
    ),
    "multiply many rows with versions": lambda dtype: multiply(dtype, versions=3, widths=[4096], bias=False, rows=300),
    "multiply with versions": lambda dtype: multiply(dtype, versions=3, widths=[64, 64], bias=False),
    "multiply with a version, alone": lambda dtype: multiply(dtype, versions=1, widths=[4096], bias=False, rows=33),
    "multiply with many versions": lambda dtype: multiply(dtype, versions=17, widths=[64], bias=False),
}
DTYPES = (mx.bfloat16, mx.float16, mx.float32)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """What the faces launch in a process that believes it has a GPU."""
    told: list[Launch] = []
    defines_of: dict[bytes, Defines] = {}

    def compile_nothing(name: str, defines: Defines, architecture: str) -> bytes:
        code = repr((name, defines, architecture)).encode()
        defines_of[code] = defines
        return code

    def launch(
        *,
        name: str,
        compiled_source: bytes,
        inputs: list[mx.array],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
        scalars: list[Any],
        shared_memory: int,
        **_: Any,
    ) -> list[mx.array]:
        defines = defines_of[compiled_source]
        told.append(Launch(name, defines, list(inputs), list(scalars), list(output_dtypes), shared_memory))
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

    for module in (
        add_norm,
        chunk_gates,
        chunk_scan,
        conv_step,
        decode_attention,
        delta_chunks,
        delta_inputs,
        gated_delta_step,
        gated_norm,
        gather,
        head_norm,
        cuda,
        pack_matrices,
        paged_attention,
        rms_norm,
        segmented_lora,
        short_conv,
        slot_copy,
        small_batch_gemm,
        token_scores,
        unit_lower_inverse,
    ):
        monkeypatch.setattr(module, "has_kernels", lambda: True)
    monkeypatch.setattr(cuda, "architecture", lambda: "sm_90")
    monkeypatch.setattr(small_batch_gemm, "architecture", lambda: "sm_90")
    monkeypatch.setattr(flash_attention, "architecture", lambda: "sm_80")  # those of warpgroups are launched apart
    monkeypatch.setattr(cuda, "target", lambda: "sm_90a")
    monkeypatch.setattr(cuda, "cubin", compile_nothing)
    monkeypatch.setattr(cuda, "_finds_modules", lambda: False)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch)
    cuda._kernel.cache_clear()
    yield told
    cuda._kernel.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("face", FACES)
def test_arguments_are_what_the_kernel_takes(face: str, dtype: mx.Dtype, launches: list[Launch]) -> None:
    FACES[face](dtype)
    assert launches
    assert [mistake for launch in launches for mistake in mistakes(launch)] == []


def test_these_are_all_kernels(launches: list[Launch]) -> None:
    for face in FACES.values():
        face(mx.bfloat16)
    assert {launch.name for launch in launches} == set(NAMES)


def test_one_code_always_asks_for_the_same_shared_memory(launches: list[Launch]) -> None:
    """MLX allows a kernel its memory when it is launched for the first time."""
    for rows in (2, 9, 30, 33, 64, 128, 500):
        for versions in (0, 1, 17):
            for widths in ([64], [896, 128, 128], [4096]):
                multiply(mx.bfloat16, versions=versions, widths=widths, bias=False, rows=rows)
    sizes: dict[tuple[str, Defines], set[int]] = {}
    for launch in launches:
        sizes.setdefault((launch.name, launch.defines), set()).add(launch.shared_memory)
    assert {name for name, _ in sizes} == {
        *("small_batch_gemm", "warpgroup_gemm"),
        *("expand", "shrink", "pack_matrices"),
    }
    assert max(map(len, sizes.values())) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        {"inputs": [mx.zeros(1)] * 3},
        {"inputs": [mx.zeros(1), mx.zeros(1, mx.int32)]},
        {"outputs": [mx.float16]},
        {"outputs": []},
        {"scalars": [1.0]},
        {"scalars": [1, 2]},
        {"defines": (("T", mx.float16), ("HALVES", False))},
        {"defines": (("T", mx.float32), ("HALVES", True))},
    ],
)
def test_a_wrong_argument_is_found(spoil: dict[str, Any]) -> None:
    right = Launch("swiglu", (("T", mx.float32), ("HALVES", False)), [mx.zeros(1)] * 2, [1], [mx.float32], 0)
    assert mistakes(right) == []
    assert mistakes(replace(right, **spoil))


@needs_nvrtc
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("face", FACES)
def test_every_launch_compiles_for_hopper_without_spilled_registers(
    face: str, dtype: mx.Dtype, launches: list[Launch]
) -> None:
    FACES[face](dtype)
    for name, defines in {(launch.name, launch.defines) for launch in launches}:
        log = compile_log(name, defines, "sm_90a")
        assert re.search(r"Used \d+ registers", log)
        assert "0 bytes spill stores" in log


@needs_nvrtc
def test_what_does_not_compile_is_told() -> None:
    with pytest.raises(CompileError, match='identifier "V" is undefined'):
        compile_log("filter_weights")


def addressed(heads_BX1D: mx.array) -> mx.array:
    """The heads as the kernel finds them, from where it starts and what it skips."""
    place = place_of(heads_BX1D)
    rows, heads, _, size = heads_BX1D.shape
    flat = place.whole.reshape(-1)
    starts_B = place.start + mx.arange(rows) * place.pitch
    index = starts_B[:, None, None] + mx.arange(heads)[:, None] * size + mx.arange(size)
    return flat[index][:, :, None]


def test_columns_of_a_product_are_found_where_they_are() -> None:
    whole = mx.arange(5 * 512).reshape(5, 1, 512)
    for part, width in zip(columns_of(whole, [256, 192, 64]), (256, 192, 64), strict=True):
        heads = part.reshape(5, 1, -1, 64).transpose(0, 2, 1, 3)
        assert isinstance(heads, Columns)
        assert heads.whole is whole
        assert heads.shape == (5, width // 64, 1, 64)
        assert mx.array_equal(addressed(heads), heads).item()


def test_arrays_of_their_own_are_found_where_they_are() -> None:
    heads = mx.arange(5 * 3 * 64).reshape(5, 3, 1, 64)
    assert mx.array_equal(addressed(heads), heads).item()


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part.reshape(1, 5, -1, 64),
        lambda part: part.reshape(5, 1, -1, 64).transpose(0, 1, 3, 2),
        lambda part: part.reshape(5, 1, -1, 64) * 2,
        lambda part: part[:, :, :64],
        lambda part: part.reshape(5, 2, -1, 64).transpose(0, 2, 1, 3),
        lambda part: part.T,
    ],
)
def test_what_is_no_longer_columns_is_an_array_of_its_own(change: Callable[[mx.array], mx.array]) -> None:
    part, _ = columns_of(mx.arange(5 * 512).reshape(5, 1, 512), [256, 256])
    assert not isinstance(change(part), Columns)


def test_what_a_kernel_wrote_is_read_by_the_next_one_without_a_view() -> None:
    whole = mx.arange(5 * 256).reshape(5, 256)
    heads = shaped(whole, (5, 4, 1, 64))
    joined = heads.transpose(0, 2, 1, 3).reshape(5, 1, -1)
    assert joined.shape == (5, 1, 256)
    assert mx.array_equal(joined.flatten(), whole.flatten()).item()
    assert memory_of(joined) is flat_rows(joined) is whole
    parts = columns_of(joined, [192, 64])
    assert [place_of(part).start for part in parts] == [0, 192]
    assert all(place_of(part).whole is whole for part in parts)
    assert mx.array_equal(mx.concatenate(parts, axis=-1), joined).item()


@pytest.mark.parametrize("x", [columns_of(mx.zeros((5, 1, 512)), [256, 256])[0], mx.zeros((5, 1, 256))])
def test_a_part_is_not_the_memory_of_all(x: mx.array) -> None:
    assert memory_of(x) is x
    assert flat_rows(x).shape == (5, 256)


def test_places_and_rows_of_more_tokens_are_those_of_the_shape() -> None:
    assert place_of(shaped(mx.zeros((6, 8)), (2, 3, 8))).pitch == 24
    assert flat_rows(shaped(mx.zeros((2, 32)), (2, 1, 4, 8))).shape == (8, 8)


@pytest.mark.parametrize("change", [operator.iadd, operator.isub, operator.imul, operator.itruediv])
def test_a_change_in_place_is_not_lost(change: Callable[[mx.array, int], mx.array]) -> None:
    whole = mx.ones((2, 8))
    changed = change(shaped(whole, (2, 1, 8)), 2)
    assert memory_of(changed).tolist() == change(mx.ones((2, 1, 8)), 2).tolist()
    assert whole.tolist() == mx.ones((2, 8)).tolist()
    with pytest.raises(TypeError, match="in place"):
        shaped(whole, (2, 1, 8))[:, :, 0] = 5


def test_a_kernel_reads_inputs_where_they_are(launches: list[Launch]) -> None:
    whole = mx.zeros((5, 64), mx.bfloat16)
    stream = mx.zeros((5, 1, 64), mx.bfloat16)
    add_norm.add_norm(shaped(whole, (1, 5, 1, 64)), stream, mx.ones(64, mx.bfloat16), 1e-5)
    assert launches[0].inputs[0] is whole
