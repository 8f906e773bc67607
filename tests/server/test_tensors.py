"""Tensors of requests and answers: sizes, types, bytes, and what is refused."""

import base64
import math
from typing import Any

import numpy as np
import pytest

from parallm.errors import InvalidRequest, NotFinite
from parallm.server.tasks.tensors import from_bytes, read_tensor, read_tensors, tensor_of, to_bytes
from parallm.tensors import DATATYPES, NUMPY_TYPES, Datatype, TensorSpec

OBS = TensorSpec(name="obs", datatype="FP32", shape=(-1, 2))


def spec(datatype: Datatype, *shape: int) -> TensorSpec:
    return TensorSpec(name="x", datatype=datatype, shape=shape)


def b64(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


@pytest.mark.parametrize(
    "given",
    [
        [[1, 2.5], [3, 4]],
        {"data": [[1, 2.5], [3, 4]]},
        {"shape": [2, 2], "data": [1, 2.5, 3, 4]},
        {"shape": [2, 2], "datatype": "FP32", "data": [[1, 2.5], [3, 4]]},
        {"shape": [2, 2], "b64": b64(np.array([1, 2.5, 3, 4], "<f4"))},
    ],
)
def test_all_forms_of_a_tensor_are_the_same_array(given: Any) -> None:
    array = read_tensor(given, OBS, "obs")
    assert (array.dtype, array.tolist()) == (np.float32, [[1, 2.5], [3, 4]])


NAN = {"shape": [2, 2], "b64": b64(np.array([1, 2, math.nan, 4], "<f4"))}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[1, 2], [3]], "same depth and length"),
        ([[1, 2], 3], "same depth and length"),
        ([1, 2], r"obs has the shape \[2\]; it should be \[-1, 2\]"),
        ([[[1]]], r"has the shape \[1, 1, 1\]"),
        ([], r"has the shape \[0\]"),
        ([[]], r"has the shape \[1, 0\]"),
        (None, "should be a list of numbers, or a tensor"),
        ("NaN", "should be a list of numbers, or a tensor"),
        ([[1, "2"]], "obs should hold numbers alone; it has 2"),
        ([[1, None]], "should hold numbers alone; it has None"),
        ([[1, True]], "should hold numbers alone; it has True"),
        ([[1, 1e300]], "NaN or infinity in row 0"),
        ([[1, 10**400]], "no room for"),
        ([[0, 0]] * 4097, "4097 rows, the limit is 4096"),
        ({}, "either data or b64"),
        ({"data": [[1, 2]], "b64": ""}, "either data or b64"),
        ({"b64": "AAAA"}, "needs its shape beside b64"),
        ({"shape": [1, 2], "data": [1, 2], "colour": 1}, "unknown field 'colour'"),
        ({"shape": [1, 2], "data": [1, 2, 3]}, r"3 numbers; the shape \[1, 2\] has 2"),
        ({"shape": [1, 2], "data": [[1], [2]]}, r"says the shape \[1, 2\], and its data has \[2, 1\]"),
        ({"shape": [1, -2], "data": [1, 2]}, "greater than or equal to 0"),
        ({"shape": [0, 2], "data": []}, r"\[0, 2\]; it should be"),
        ({"shape": [1] * 9, "data": [1]}, "at most 8 items"),
        ({"shape": [1, 2], "datatype": "FP64", "data": [1, 2]}, "obs is FP64, and this model takes FP32"),
        ({"shape": [1, 2], "datatype": "BYTES", "data": [1, 2]}, "datatype"),
        ({"shape": [1, 2], "b64": "AAAA"}, "4 characters of base64; FP32 .* has 12"),
        ({"shape": [1, 2], "b64": "!AAAAAAAAAA="}, "is no base64"),
        ({"shape": [1, 2], "b64": "A" * 12}, "has 9 bytes; FP32 .* has 8"),
        (NAN, "NaN or infinity in row 1"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        read_tensors({"obs": given}, [OBS], "observations")
    assert refused.value.parameter is not None


@pytest.mark.parametrize("shape", [[1 << 31, 1 << 31], [1 << 62, 2], [4096, 2]])
def test_a_shape_that_promises_more_than_there_is_costs_nothing(
    shape: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("frombuffer", "array", "zeros", "empty"):
        monkeypatch.setattr(np, name, lambda *_, **__: pytest.fail("an array was made"))
    for given in ({"shape": shape, "b64": "AAAA"}, {"shape": shape, "data": [1.0, 2.0]}):
        with pytest.raises(InvalidRequest):
            read_tensor(given, OBS, "obs")
    with pytest.raises(InvalidRequest):
        from_bytes(b"1234", shape, OBS, "obs")


def test_tensors_that_are_missing_or_unknown_are_named() -> None:
    with pytest.raises(InvalidRequest, match="observations has no tensor 'x'; it has obs"):
        read_tensors({"x": [[1, 2]]}, [OBS], "observations")
    with pytest.raises(InvalidRequest, match="the tensor obs is missing in observations"):
        read_tensors({}, [OBS], "observations")


@pytest.mark.parametrize("datatype", DATATYPES)
def test_bytes_there_and_back_are_the_same(datatype: Datatype) -> None:
    numbers = [0, 1, 1, 0] if datatype == "BOOL" else [0, 1, 2, 100]
    array = np.array(numbers, NUMPY_TYPES[datatype]).reshape(2, 2)
    there = to_bytes(array, datatype)
    np.testing.assert_array_equal(from_bytes(there, [2, 2], spec(datatype, -1, 2), "x"), array)
    written = tensor_of(array, datatype, "b64")
    np.testing.assert_array_equal(read_tensor(written.model_dump(), spec(datatype, -1, 2), "x"), array)


def test_bf16_is_rounded_to_the_nearest_and_ties_to_even() -> None:
    bits = np.array([0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000], "<u4")
    found = np.frombuffer(to_bytes(bits.view("<f4"), "BF16"), "<u2")
    assert [f"{number:04x}" for number in found] == ["3f80", "3f80", "3f80", "3f81", "3f82"]


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_numbers_of_16_bits_travel_as_bytes_alone(datatype: Datatype) -> None:
    with pytest.raises(InvalidRequest, match="has no form in JSON; send b64"):
        read_tensor([[1.0]], spec(datatype, -1, 1), "x")
    with pytest.raises(InvalidRequest, match="has no form in JSON; ask for bytes"):
        tensor_of(np.ones((1, 1), np.float32), datatype, "json")


@pytest.mark.parametrize(
    ("datatype", "given"),
    [("INT8", [300]), ("UINT8", [-1]), ("INT64", [1 << 63]), ("INT32", [1.0]), ("BOOL", [1]), ("UINT64", [True])],
)
def test_numbers_that_a_type_cannot_hold_are_refused(datatype: Datatype, given: list[Any]) -> None:
    with pytest.raises(InvalidRequest):
        read_tensor(given, spec(datatype, -1), "x")


def test_bytes_that_are_no_booleans_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="bytes of 0 and 1"):
        from_bytes(b"\x00\x02", [2], spec("BOOL", -1), "x")


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_nan_is_an_error_and_never_json(number: float) -> None:
    with pytest.raises(NotFinite):
        tensor_of(np.array([1.0, number], np.float32), "FP32", "json")
    # the control: finite numbers are written
    assert tensor_of(np.array([1.0, 2.0], np.float32), "FP32", "json").data == [1.0, 2.0]


def test_float32_in_json_is_read_back_bit_for_bit() -> None:
    array = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    written = tensor_of(array, "FP32", "json").model_dump_json()
    read = read_tensor(tensor_of(array, "FP32", "json").model_validate_json(written).model_dump(), OBS, "obs")
    np.testing.assert_array_equal(read, array)
