"""mlx-lm's model -> a GGUF file, tensor by tensor, so that one is in memory at a time. Runs on the device thread."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from parallm.errors import ModelError
from parallm.model.gguf.blocks import GROUP, quantize_q8_0
from parallm.model.gguf.config import ARCHITECTURES
from parallm.model.gguf.file import ARRAY, BOOL, DEFAULT_ALIGNMENT, KINDS, MAGIC, STRING, Value
from parallm.model.gguf.metadata import rotary_factors, write_config, write_tokenizer
from parallm.model.gguf.names import pairs_order, write_name

VERSION = 3
NUMBERS = {kind.name: number for number, kind in KINDS.items()}
FLOATS = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}
"""Types of matrices; vectors are float32, as llama.cpp wants them."""
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""`general.file_type` of a file whose matrices are of a type."""
QUANTIZATION_VERSION = 2
UINT32, INT32, FLOAT32 = 4, 5, 6
MATRICES = 2  # dimensions


def write_gguf(
    base: nn.Module, config: Mapping[str, Any], source: Path, path: Path, *, name: str, is_q8_0: bool
) -> int:
    """Write the arrays of `base`, which is not quantized, `config` and the tokenizer of the model folder `source`.

    With `is_q8_0` matrices have 8 bits, in groups of 32. Returns the bytes of the file. Raises ModelError for what a
    GGUF file cannot say, OSError if the disk does not take it.
    """
    arrays = dict(tree_flatten(base.parameters()))
    # config.json leaves keys to their defaults, and may name others than those that mlx-lm computes with
    config = {**config, **{key: value for key, value in vars(base.args).items() if value is not None}}
    if config.get("tie_word_embeddings"):
        arrays.pop("lm_head.weight", None)
    rows = arrays["model.embed_tokens.weight"].shape[0]
    try:
        metadata = write_config(config, rows)
    except KeyError as error:
        raise ModelError(f"{source / 'config.json'} lacks {error}, which a GGUF file needs") from error
    architecture = str(metadata["general.architecture"])
    tensors = [_Output(target, array, config, architecture, is_q8_0) for target, array in sorted(arrays.items())]
    extra = rotary_factors(config)
    most = max((tensor for tensor in tensors if len(tensor.shape) == MATRICES), key=lambda one: one.nbytes)
    metadata |= {
        "general.type": "model",
        "general.name": name,
        "general.file_type": FILE_TYPES[most.kind],
        "general.quantization_version": QUANTIZATION_VERSION,
        **write_tokenizer(source, config, rows),
    }
    with path.open("wb") as file:
        infos = [(tensor.name, tensor.shape, tensor.kind, tensor.nbytes) for tensor in tensors]
        infos += [(name, factors.shape, "F32", factors.nbytes) for name, factors in extra.items()]
        file.write(_header(metadata, infos))
        for tensor in tensors:
            _pad(file)
            tensor.write(file)
        for factors in extra.values():
            _pad(file)
            file.write(factors.tobytes())
        _pad(file)
        return file.tell()


class _Output:
    """An array of the model as a tensor of the file."""

    def __init__(
        self, target: str, array: mx.array, config: Mapping[str, Any], architecture: str, is_q8_0: bool
    ) -> None:
        name = write_name(target, architecture)
        if name is None:
            raise ModelError(f"{target} of a {config['model_type']} has no name in GGUF, so that it is not written so")
        kind = ARCHITECTURES[architecture]
        self.name, self.shape = name, tuple(array.shape)
        is_matrix = len(self.shape) == MATRICES
        self.kind = FLOATS[array.dtype] if is_matrix else "F32"
        if is_matrix and is_q8_0:
            if self.shape[1] % GROUP:
                raise ModelError(f"{target} has {self.shape[1]} inputs, which groups of {GROUP} do not divide")
            self.kind = "Q8_0"
        self._array = array
        self._offset = 1.0 if kind.norms_hold_one and name.endswith("norm.weight") else 0.0
        self._order = None
        if kind.rotates_pairs and ".attn_q." in name:
            self._order = pairs_order(self.shape[0], config["num_attention_heads"])
        elif kind.rotates_pairs and ".attn_k." in name:
            heads = config.get("num_key_value_heads") or config["num_attention_heads"]
            self._order = pairs_order(self.shape[0], heads)

    @property
    def nbytes(self) -> int:
        form = KINDS[NUMBERS[self.kind]]
        size = 1
        for length in self.shape:
            size *= length
        return size // form.elements * form.nbytes

    def write(self, file: BinaryIO) -> None:
        """Evaluate the array and write it."""
        array = self._array if self._order is None else self._array[mx.array(self._order)]
        if self.kind in ("F32", "Q8_0"):
            array = array.astype(mx.float32) + self._offset
        numbers: NDArray[Any] = np.array(array.view(mx.uint16) if self.kind == "BF16" else array)
        if self.kind == "F16" and not np.isfinite(numbers).all():
            raise ModelError(f"{self.name} has numbers beyond the range of float16; set model.dtype=bfloat16")
        file.write((quantize_q8_0(numbers) if self.kind == "Q8_0" else numbers).data)


def _header(metadata: Mapping[str, Value], infos: list[tuple[str, tuple[int, ...], str, int]]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(infos), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), _value(value)]
    offset = 0
    for name, shape, kind, nbytes in infos:
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts += [_text(name), dimensions, struct.pack("<IQ", NUMBERS[kind], offset)]
        offset += -(-nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    return b"".join(parts)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % DEFAULT_ALIGNMENT))


def _text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: Value) -> bytes:
    """A value with its type before it: integers are unsigned and numbers float32, as llama.cpp reads them."""
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, list):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))
    kind = FLOAT32 if value.dtype == np.float32 else INT32
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + value.tobytes()
