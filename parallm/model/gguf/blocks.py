"""Blocks of GGUF tensors <-> arrays: quantized ones as MLX packs them, in groups of 32 with float32 scales. No MLX.

MLX computes a weight as scale * q + bias, with q in few bits. The scales of all types here are products of at most 17
significant bits, so that float32 makes the very number that llama.cpp's formula does; in float16 it would not. Q2_K,
Q3_K and Q6_K have groups of 16, with which MLX does not multiply, so they are unpacked.
The layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.

Axes: O outputs, N blocks of an output, B bytes of a block, G groups of 32, S groups within a block, W words of 32 bits,
I inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallm.model.gguf.file import Tensor

GROUP = 32
"""Weights that share a scale."""
FOUR = np.uint8(4)
"""The type of what is shifted by it stays."""
CHUNK = 1 << 23
"""Weights that are rearranged at once: it takes some bytes for each."""
NOT_A_NUMBER = 255
"""Exponent of microscaled blocks that stands for none (OCP Microscaling Formats 1.0)."""
NOT_FINITE = "the tensor '{tensor}' has scales that are not finite; the file is damaged"

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Parts = tuple[Bytes, NDArray[Any], Floats | None]
"""Values (O, N, S, 32), scales and biases (O, N, S) of blocks; microscaled blocks have no biases."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights as MLX's quantized layers hold them."""

    weight_OW: NDArray[np.uint32]
    scales_OG: NDArray[Any]
    """float32, or the exponents of powers of two as bytes."""
    biases_OG: Floats | None
    bits: int
    mode: str


def read_dense(tensor: Tensor) -> NDArray[Any]:
    """The numbers of a tensor in its shape: float32, float16, bfloat16 as uint16, or float32 of types in `UNPACKED`.

    Raises KeyError for types that are packed, ValueError for scales that are not finite.
    """
    unpack = UNPACKED.get(tensor.kind.name)
    if unpack is None:
        return tensor.data.view(DENSE[tensor.kind.name]).reshape(tensor.shape)
    dense_OI = np.empty(tensor.shape, np.float32)
    for start, end, blocks_ONB in _chunks(tensor):
        with np.errstate(invalid="ignore"):
            dense_OI[start:end] = unpack(blocks_ONB)
        if not np.isfinite(dense_OI[start:end]).all():
            raise ValueError(NOT_FINITE.format(tensor=tensor.name))
    return dense_OI


def read_packed(tensor: Tensor) -> Packed:
    """The weights (O, I) of a tensor of a type in `PACKED`. Raises ValueError for scales that are not finite."""
    kind = PACKED[tensor.kind.name]
    outputs, inputs = tensor.shape
    weight_OW = np.empty((outputs, inputs * kind.bits // 32), np.uint32)
    scales_OG = np.empty((outputs, inputs // GROUP), np.uint8 if kind.mode == "mxfp4" else np.float32)
    biases_OG = None if kind.mode == "mxfp4" else np.empty_like(scales_OG)
    for start, end, blocks_ONB in _chunks(tensor):
        with np.errstate(invalid="ignore"):
            values, scales, biases = kind.read(blocks_ONB)
        weight_OW[start:end] = PACK[kind.bits](values).reshape(end - start, -1)
        scales_OG[start:end] = scales.reshape(end - start, -1)
        if biases is not None and biases_OG is not None:
            biases_OG[start:end] = biases.reshape(end - start, -1)
    if biases_OG is None:
        is_finite = bool((scales_OG < NOT_A_NUMBER).all())
    else:
        is_finite = bool(np.isfinite(scales_OG).all() and np.isfinite(biases_OG).all())
    if not is_finite:
        raise ValueError(NOT_FINITE.format(tensor=tensor.name))
    return Packed(weight_OW, scales_OG, biases_OG, kind.bits, kind.mode)


def quantize_q8_0(weights_OI: Floats) -> Bytes:
    """The blocks (O, bytes) of float32 weights: rounded to 127 steps of the largest of each 32, away from zero where
    two are as near, as llama.cpp's reference does."""
    groups = weights_OI.reshape(-1, GROUP)
    steps = np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore"):
        scaled = groups * np.where(steps == 0, np.float32(0), np.float32(1) / steps)
    rounded = np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled).astype(np.int8)
    blocks = np.concatenate([steps.astype("<f2").view(np.uint8), rounded.view(np.uint8)], axis=1)
    return blocks.reshape(len(weights_OI), -1)


def _chunks(tensor: Tensor) -> Any:
    """First and last output, and their blocks (O, N, B), of some outputs after others."""
    blocks_OB = tensor.rows
    step = max(1, CHUNK // tensor.shape[-1])
    for start in range(0, len(blocks_OB), step):
        chunk = blocks_OB[start : start + step]
        yield start, start + len(chunk), chunk.reshape(len(chunk), -1, tensor.kind.nbytes)


def _half(blocks_ONB: Bytes, at: int) -> Floats:
    """The float16 at a byte of each block, (O, N, 1) in float32."""
    return np.ascontiguousarray(blocks_ONB[..., at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(quants: Bytes) -> Bytes:
    """(..., 16) bytes -> 32 values: the low halves of all, then the high ones."""
    return np.concatenate([quants & 15, quants >> 4], axis=-1)


def _fifth_bits(quants: Bytes) -> Bytes:
    """(..., 4) bytes, the fifth bits of 32 values -> (..., 32) bytes of 0 or 16."""
    return np.unpackbits(quants, axis=-1, bitorder="little") << FOUR


def _signed(values: Bytes, scale: Floats, zero: int) -> Parts:
    """Values of which `zero` stands for 0, one group in a block."""
    return values[..., None, :], scale, scale * np.float32(-zero)


def _q4_0(blocks: Bytes) -> Parts:
    return _signed(_nibbles(blocks[..., 2:]), _half(blocks, 0), 8)


def _q4_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[..., 4:])[..., None, :], _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Parts:
    return _signed(_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6]), _half(blocks, 0), 16)


def _q5_1(blocks: Bytes) -> Parts:
    values = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return values[..., None, :], _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Parts:
    return _signed(blocks[..., 2:] ^ np.uint8(128), _half(blocks, 0), 128)


def _q4_k(blocks: Bytes) -> Parts:
    scales, biases = _scales_of_k(blocks)
    return _sub_blocks(blocks[..., 16:]), scales, biases


def _q5_k(blocks: Bytes) -> Parts:
    scales, biases = _scales_of_k(blocks)
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return _sub_blocks(blocks[..., 48:]) | high << FOUR, scales, biases


def _sub_blocks(quants: Bytes) -> Bytes:
    """(O, N, 128) bytes -> (O, N, 8, 32): each 32 bytes hold one sub-block in their low halves, the next in the high
    ones."""
    pairs = quants.reshape(*quants.shape[:-1], 4, 32)
    return np.stack([pairs & 15, pairs >> 4], axis=-2).reshape(*quants.shape[:-1], 8, 32)


def _scales_of_k(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and biases (O, N, 8) of blocks that begin with two float16 and twelve bytes of 6-bit numbers."""
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1).astype(np.float32)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1).astype(np.float32)
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _mxfp4(blocks: Bytes) -> Parts:
    return _nibbles(blocks[..., 1:])[..., None, :], blocks[..., :1], None


def _q2_k(blocks: Bytes) -> Floats:
    """(O, N, 84) bytes -> (O, I) float32: halves of 128 weights, whose four parts of 32 share their bytes; each 16
    weights have a scale and a minimum of 4 bits."""
    values = _quarters(blocks[..., 16:80]).reshape(*blocks.shape[:-1], 16, 16).astype(np.float32)
    scales = _half(blocks, 80) * (blocks[..., :16] & 15).astype(np.float32)
    minima = _half(blocks, 82) * (blocks[..., :16] >> FOUR).astype(np.float32)
    return (values * scales[..., None] - minima[..., None]).reshape(len(blocks), -1)


def _q3_k(blocks: Bytes) -> Floats:
    """(O, N, 110) bytes -> (O, I) float32: as Q2_K, with a third bit that is missing where it is 4 less, and scales of
    6 bits around 32."""
    shape = blocks.shape[:-1]
    third = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    low = _quarters(blocks[..., 32:96]).astype(np.int8)
    values = low - (np.int8(4) - (third.astype(np.int8) << np.int8(2))).reshape(low.shape)
    first, high = blocks[..., 96:104], blocks[..., None, 104:108]
    low_scales = np.concatenate([first & 15, first >> FOUR], axis=-1)
    high_scales = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)).reshape(*shape, 16)
    scales = (low_scales | high_scales << FOUR).astype(np.int8) - np.int8(32)
    weights = values.reshape(*shape, 16, 16).astype(np.float32)
    return (weights * (_half(blocks, 108) * scales.astype(np.float32))[..., None]).reshape(len(blocks), -1)


def _quarters(quants: Bytes) -> Bytes:
    """(O, N, 64) bytes -> (O, N, 2, 4, 32) values of 2 bits: the lowest bits of each 32 bytes first."""
    halves = quants.reshape(*quants.shape[:-1], 2, 1, 32)
    return halves >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)


def _q6_k(blocks: Bytes) -> Floats:
    """(O, N, 210) bytes -> (O, I) float32: halves of 128 weights, whose four parts of 32 share their bytes."""
    shape = blocks.shape[:-1]
    low = blocks[..., :128].reshape(*shape, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*shape, 2, 4, 32)
    high = blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    values = (low | high << 4).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32) * _half(blocks, 208)
    weights = values.reshape(*shape, 16, 16).astype(np.float32) * scales[..., None]
    return weights.reshape(shape[0], -1)


def _pack_4(values: Bytes) -> Bytes:
    return np.ascontiguousarray(values[..., 0::2] | values[..., 1::2] << 4).view("<u4")


def _pack_5(values: Bytes) -> Bytes:
    """Eight values are five bytes."""
    words = np.zeros((*values.shape[:-1], 4), "<u8")
    for place in range(8):
        words |= values[..., place::8].astype("<u8") << np.uint64(5 * place)
    eights = words.view(np.uint8).reshape(*words.shape, 8)
    return np.ascontiguousarray(eights[..., :5]).reshape(*values.shape[:-1], 20).view("<u4")


def _pack_8(values: Bytes) -> Bytes:
    return np.ascontiguousarray(values).view("<u4")


@dataclass(frozen=True, slots=True)
class _PackedKind:
    bits: int
    read: Callable[[Bytes], Parts]
    mode: str = "affine"


DENSE: Mapping[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Types of plain numbers, as numpy calls them; it has no bfloat16."""
UNPACKED: Mapping[str, Callable[[Bytes], Floats]] = {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q6_K": _q6_k}
"""Types in groups of 16."""
PACKED: Mapping[str, _PackedKind] = {
    "Q4_0": _PackedKind(4, _q4_0),
    "Q4_1": _PackedKind(4, _q4_1),
    "Q5_0": _PackedKind(5, _q5_0),
    "Q5_1": _PackedKind(5, _q5_1),
    "Q8_0": _PackedKind(8, _q8_0),
    "Q4_K": _PackedKind(4, _q4_k),
    "Q5_K": _PackedKind(5, _q5_k),
    "MXFP4": _PackedKind(4, _mxfp4, "mxfp4"),
}
"""Types that MLX multiplies as they are."""
PACK: Mapping[int, Callable[[Bytes], Bytes]] = {4: _pack_4, 5: _pack_5, 8: _pack_8}
"""Values (..., 32) of so many bits -> words, the first value in the lowest bits."""
