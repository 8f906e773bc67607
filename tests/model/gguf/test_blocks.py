"""Every type of blocks, against gguf-py's own arithmetic, which is llama.cpp's."""

from collections.abc import Callable
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from parallm.errors import ModelError
from parallm.model.gguf import blocks
from parallm.model.gguf.blocks import PACKED, quantize_q8_0, read_dense, read_packed
from parallm.model.gguf.file import KINDS, Kind, Tensor, read_gguf

NUM_BLOCKS = 10_000
SHAPES = (1, 16, 625)
"""Outputs that the blocks are arranged in."""
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "MXFP4": (),
}
"""Where blocks have float16 numbers; others begin with one."""
BY_NAME = {kind.name: kind for kind in KINDS.values()}
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # in gguf-py


def random_blocks(kind: Kind, seed: int) -> NDArray[np.uint8]:
    """Blocks of any bytes, (blocks, bytes), whose float16 numbers are finite: of all sizes and signs."""
    random = np.random.default_rng(seed)
    found = random.integers(0, 256, (NUM_BLOCKS, kind.nbytes), dtype=np.uint8)
    if kind.elements == 1:
        size = kind.nbytes * 32
        return random.normal(size=(NUM_BLOCKS, 32)).astype("<f4").view(np.uint8)[:, :size]
    if kind.name == "MXFP4":
        found[:, 0] = random.integers(0, 255, NUM_BLOCKS)  # 255 is no number
    for at in HALVES.get(kind.name, (0,)):
        halves = random.integers(0, 1 << 16, NUM_BLOCKS).astype("<u2")
        halves[(halves & 0x7C00) == 0x7C00] &= 0x83FF  # no infinity, no NaN
        found[:, at : at + 2] = halves[:, None].view(np.uint8)
    return found


def as_tensor(kind: Kind, data: NDArray[np.uint8], rows: int) -> Tensor:
    elements = data.size // kind.nbytes * kind.elements
    return Tensor("blk.0.ffn_up.weight", kind, (rows, elements // rows), data.reshape(-1))


def numbers(tensor: Tensor) -> NDArray[np.float32]:
    """What MLX computes with, float32."""
    if tensor.kind.name in PACKED:
        packed = read_packed(tensor)
        biases = None if packed.biases_OG is None else mx.array(packed.biases_OG)
        weight = mx.dequantize(
            mx.array(packed.weight_OW), mx.array(packed.scales_OG), biases, 32, packed.bits, packed.mode
        )
        return np.array(weight.astype(mx.float32))
    dense = read_dense(tensor)
    if tensor.kind.name == "BF16":
        return np.array(mx.array(dense).view(mx.bfloat16).astype(mx.float32))
    return dense.astype(np.float32)


def are_equal(found: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    """Whether all bits are equal; the sign of a zero does not count."""
    same = (found.view(np.uint32) == expected.view(np.uint32)) | ((found == 0) & (expected == 0))
    return bool((same | (np.isnan(found) & np.isnan(expected))).all())


@pytest.mark.parametrize("name", BY_NAME)
def test_blocks_are_to_the_bit_what_gguf_py_makes_of_them(
    name: str, record_property: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = BY_NAME[name]
    data = random_blocks(kind, seed=len(name))
    for rows in SHAPES:
        tensor = as_tensor(kind, data, rows)
        expected = gguf.quants.dequantize(data.reshape(rows, -1), GGMLQuantizationType[name])
        assert are_equal(numbers(tensor), expected.reshape(tensor.shape))
    monkeypatch.setattr(blocks, "CHUNK", 3 * tensor.shape[-1])
    assert are_equal(numbers(tensor), expected), "in several pieces"
    record_property("gguf.types_exact", 1)


@pytest.mark.parametrize("name", [name for name in PACKED if name != "MXFP4"])
def test_float16_scales_would_not_be_exact(name: str, record_property: Callable[[str, object], None]) -> None:
    data = random_blocks(BY_NAME[name], seed=len(name))
    packed = read_packed(as_tensor(BY_NAME[name], data, 625))
    assert packed.biases_OG is not None
    scales, biases = (mx.array(array).astype(mx.float16) for array in (packed.scales_OG, packed.biases_OG))
    weight = mx.dequantize(mx.array(packed.weight_OW), scales, biases, 32, packed.bits)
    expected = gguf.quants.dequantize(data.reshape(625, -1), GGMLQuantizationType[name])
    assert not are_equal(np.array(weight.astype(mx.float32)), expected)
    record_property("gguf.control_types_inexact", 1)


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("Q4_0", 1, 0x7C),
        ("Q5_K", 3, 0xFE),
        ("Q6_K", 209, 0x7E),
        ("MXFP4", 0, 255),
        ("Q2_K", 83, 0x7C),
        ("Q3_K", 109, 0xFC),
    ],
)
def test_scales_that_are_no_numbers_are_refused(name: str, at: int, value: int) -> None:
    data = random_blocks(BY_NAME[name], seed=0)
    data[77, at] = value
    with pytest.raises(ValueError, match=r"'blk.0.ffn_up.weight' has scales that are not finite"):
        numbers(as_tensor(BY_NAME[name], data, 625))


def test_q8_0_is_written_as_gguf_py_writes_it() -> None:
    weights = np.random.default_rng(0).normal(size=(300, 4096)).astype(np.float32)
    weights[:, :32] = 0
    weights[0, 32:64] = np.arange(-16, 16) / 2  # halves between two steps
    expected = gguf.quants.quantize(weights, GGMLQuantizationType.Q8_0)
    assert np.array_equal(quantize_q8_0(weights), expected)


@pytest.mark.cpu
def test_mlx_does_not_multiply_in_groups_of_sixteen_so_these_are_unpacked() -> None:
    assert not PACKED.keys() & {"Q2_K", "Q3_K", "Q6_K"}
    words, scales = mx.zeros((64, 32), mx.uint32), mx.ones((64, 16))
    with pytest.raises(RuntimeError, match="group size must be 32"):
        mx.eval(mx.quantized_matmul(mx.ones((3, 256)), words, scales, scales, True, 16, 4))


@pytest.mark.parametrize("kind", [kind for kind in GGMLQuantizationType if kind.name not in BY_NAME])
def test_the_file_of_a_type_that_is_not_read_names_it(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    _, nbytes = gguf.GGML_QUANT_SIZES[kind]
    writer.add_tensor("output.weight", np.zeros((4, nbytes), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=f"'output.weight' is of the type {kind.name},.*of the types F32, .*MXFP4"):
        read_gguf(tmp_path / "x.gguf")
