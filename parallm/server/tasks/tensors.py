"""Tensors in JSON and as bytes: a body's tensors become arrays, arrays become an answer's tensors. NumPy, no MLX.

What a tensor says of its size is compared with what it brings before an array is made of it. NaN and infinity are
refused; numbers of 16 bits travel as bytes alone, as in KServe's protocol.
"""

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeGuard

import numpy as np
from pydantic import Field, PlainValidator

from parallm.errors import InvalidRequest, NotFinite
from parallm.server.schemas import Wire, checked
from parallm.tensors import DATATYPES, ITEM_BYTES, NUMPY_TYPES, Array, Arrays, Datatype, TensorSpec

MAX_AXES = 8
MAX_ROWS = 4096
"""Rows of a request."""
SECONDS_PER_NUMBER = 3e-7
"""Time to write a number of a tensor as JSON."""
Encoding = Literal["json", "b64"]
BF16_SHIFT = 16
BELOW_HALF = 0x7FFF
WORDS: Mapping[str, str] = {"BOOL": "true and false", "INT": "whole numbers", "FP": "numbers"}
"""What lists of a datatype hold, by a part of its name."""


class TensorBody(Wire):
    """A tensor: its numbers row by row as `data`, flat or nested, or little-endian bytes in base64 as `b64`."""

    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_AXES)] | None = None
    """Absent: as `data` is nested."""
    datatype: Datatype | None = None
    """KServe's name, such as FP32; absent: the model's own."""
    data: Any = None
    b64: str | None = None


def unread(value: object) -> object:
    return value


GivenTensor = Annotated[Any, PlainValidator(unread, json_schema_input_type=TensorBody | list[Any])]
"""A tensor, or its numbers as a nested list, before the signature says what it should be."""


def read_inputs(given: object, specs: Sequence[TensorSpec], field: str) -> dict[str, Array]:
    """Return tensors by name; where one is needed alone, it may stand without its name. Raises InvalidRequest."""
    if isinstance(given, dict) and not given.keys() & TensorBody.model_fields.keys():
        return read_tensors(given, specs, field)
    needed = [spec for spec in specs if not spec.is_optional]
    if len(needed) > 1:
        names = ", ".join(spec.name for spec in needed)
        raise InvalidRequest(f"{field} should be an object with the tensors {names}", field)
    return {needed[0].name: read_tensor(given, needed[0], field)}


def read_tensors(given: Mapping[str, Any], specs: Sequence[TensorSpec], field: str) -> dict[str, Array]:
    """Return the arrays of a body's tensors by name. Raises InvalidRequest naming `field` and the tensor."""
    names = [spec.name for spec in specs]
    for name in given:
        if name not in names:
            raise InvalidRequest(f"{field} has no tensor {name[:100]!r}; it has {', '.join(names) or 'none'}", field)
    for spec in specs:
        if spec.name not in given and not spec.is_optional:
            raise InvalidRequest(f"the tensor {spec.name} is missing in {field}", field)
    return {
        spec.name: read_tensor(given[spec.name], spec, f"{field}.{spec.name}") for spec in specs if spec.name in given
    }


def read_tensor(value: object, spec: TensorSpec, field: str) -> Array:
    """Return the array of a tensor, or of a nested list of the signature's type. Raises InvalidRequest."""
    if not isinstance(value, dict):
        return _from_data(value, None, spec, field)
    body = checked(value, TensorBody, {})
    check_datatype(body.datatype or spec.datatype, spec, field)
    if (body.data is None) == (body.b64 is None):
        raise InvalidRequest(f"{field} should have either data or b64", field)
    if body.b64 is None:
        return _from_data(body.data, body.shape, spec, field)
    if body.shape is None:
        raise InvalidRequest(f"{field} needs its shape beside b64", field)
    check_shape(body.shape, spec, field)
    size = math.prod(body.shape) * ITEM_BYTES[spec.datatype]
    if len(body.b64) != -(-size // 3) * 4:
        raise InvalidRequest(
            f"{field} has {len(body.b64)} characters of base64; {spec.datatype} {body.shape} has {-(-size // 3) * 4}",
            field,
        )
    try:
        content = base64.b64decode(body.b64, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{field} is no base64: {error}", field) from error
    return from_bytes(content, body.shape, spec, field)


def from_bytes(content: bytes, shape: Sequence[int], spec: TensorSpec, field: str) -> Array:
    """Return the array of little-endian bytes. Raises InvalidRequest."""
    check_shape(shape, spec, field)
    size = math.prod(shape) * ITEM_BYTES[spec.datatype]
    if len(content) != size:
        raise InvalidRequest(f"{field} has {len(content)} bytes; {spec.datatype} {list(shape)} has {size}", field)
    if spec.datatype == "BF16":
        array = (np.frombuffer(content, "<u2").astype("<u4") << BF16_SHIFT).view("<f4")
    elif spec.datatype == "FP16":
        array = np.frombuffer(content, "<f2").astype("<f4")
    else:
        array = np.frombuffer(content, NUMPY_TYPES[spec.datatype].newbyteorder("<"))
        if spec.datatype == "BOOL" and (np.frombuffer(content, np.uint8) > 1).any():
            raise InvalidRequest(f"{field} should have bytes of 0 and 1", field)
    return _finite(array.reshape(tuple(shape)), field)


def check_datatype(datatype: str, spec: TensorSpec, field: str) -> None:
    if datatype not in DATATYPES:
        raise InvalidRequest(f"{field} has the datatype {datatype[:40]!r}; there are {', '.join(DATATYPES)}", field)
    if datatype != spec.datatype:
        raise InvalidRequest(f"{field} is {datatype}, and this model takes {spec.datatype}", field)


def check_shape(shape: Sequence[int], spec: TensorSpec, field: str) -> None:
    """Raise InvalidRequest for a shape that the signature does not allow."""
    fits = len(shape) == len(spec.shape) and all(
        size == fixed if fixed >= 0 else size >= 1 for size, fixed in zip(shape, spec.shape, strict=True)
    )
    if not fits:
        raise InvalidRequest(f"{field} has the shape {list(shape)[:MAX_AXES]}; it should be {list(spec.shape)}", field)
    if shape[0] > MAX_ROWS:
        raise InvalidRequest(f"{field} has {shape[0]} rows, the limit is {MAX_ROWS}; send several requests", field)


def tensor_of(array: Array, datatype: Datatype, encoding: Encoding) -> TensorBody:
    """Return an array as a tensor of an answer. Raises NotFinite for NaN and infinity."""
    shape = list(array.shape)
    if encoding == "b64":
        return TensorBody(shape=shape, datatype=datatype, b64=base64.b64encode(to_bytes(array, datatype)).decode())
    return TensorBody(shape=shape, datatype=datatype, data=to_list(array, datatype))


def to_list(array: Array, datatype: Datatype) -> list[Any]:
    """Return the numbers of an array row by row. Raises NotFinite, InvalidRequest for numbers of 16 bits."""
    if datatype in ("FP16", "BF16"):
        raise InvalidRequest(f"{datatype} has no form in JSON; ask for bytes", "encoding")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise NotFinite("the model computes values that are not finite")
    return array.ravel().tolist()


def to_bytes(array: Array, datatype: Datatype) -> bytes:
    """Return the little-endian bytes of an array; BF16 is rounded to the nearest, ties to even."""
    if datatype == "BF16":
        bits = np.ascontiguousarray(array, "<f4").view("<u4")
        return ((bits + BELOW_HALF + ((bits >> BF16_SHIFT) & 1)) >> BF16_SHIFT).astype("<u2").tobytes()
    return array.astype("<f2" if datatype == "FP16" else NUMPY_TYPES[datatype].newbyteorder("<")).tobytes()


def check_rows(arrays: Arrays, field: str) -> int:
    """Return the number of rows that all arrays have. Raises InvalidRequest."""
    sizes = {name: len(array) for name, array in arrays.items()}
    if len(set(sizes.values())) != 1:
        text = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise InvalidRequest(f"tensors have different numbers of rows: {text}", field)
    return next(iter(sizes.values()))


def _from_data(data: object, shape: Sequence[int] | None, spec: TensorSpec, field: str) -> Array:
    if spec.datatype in ("FP16", "BF16"):
        raise InvalidRequest(f"{field}: {spec.datatype} has no form in JSON; send b64", field)
    if not isinstance(data, list):
        raise InvalidRequest(f"{field} should be a list of numbers, or a tensor with shape and data", field)
    nested, numbers = _flattened(data, field)
    if shape is None:
        shape = nested
    elif len(nested) > 1 and list(shape) != nested:
        raise InvalidRequest(f"{field} says the shape {list(shape)}, and its data has {nested}", field)
    check_shape(shape, spec, field)
    if math.prod(shape) != len(numbers):
        raise InvalidRequest(
            f"{field} has {len(numbers)} numbers; the shape {list(shape)} has {math.prod(shape)}", field
        )
    return _finite(_array(numbers, spec.datatype, field).reshape(tuple(shape)), field)


def _flattened(data: list[Any], field: str) -> tuple[list[int], list[Any]]:
    """Return how a list is nested, and its numbers. Raises InvalidRequest where lists differ in length or depth."""
    shape = [len(data)]
    while data and isinstance(data[0], list):
        size = len(data[0])
        if len(shape) == MAX_AXES or not _are_lists(data, size):
            raise InvalidRequest(f"{field} should be nested to the same depth and length everywhere", field)
        shape.append(size)
        data = [item for part in data for item in part]
    return shape, data


def _are_lists(data: list[Any], size: int) -> TypeGuard[list[list[Any]]]:
    return all(isinstance(item, list) and len(item) == size for item in data)


def _array(numbers: list[Any], datatype: Datatype, field: str) -> Array:
    kinds: tuple[type, ...] = (bool,) if datatype == "BOOL" else (int,) if "INT" in datatype else (int, float)
    for item in numbers:
        if type(item) not in kinds:
            words = next(text for part, text in WORDS.items() if part in datatype)
            raise InvalidRequest(f"{field} should hold {words} alone; it has {str(item)[:40]}", field)
    try:
        with np.errstate(over="ignore"):
            return np.array(numbers, NUMPY_TYPES[datatype])
    except OverflowError as error:
        raise InvalidRequest(f"{field} holds a number that {datatype} has no room for", field) from error


def _finite(array: Array, field: str) -> Array:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        row = int(np.isfinite(array).reshape(len(array), -1).all(axis=1).argmin())
        raise InvalidRequest(f"{field} holds NaN or infinity in row {row}", field)
    return array
