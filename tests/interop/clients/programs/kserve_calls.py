"""Triton's own client for named tensors, over HTTP: JSON, bytes, versions, the language model."""

import numpy as np
from checking import MODEL, expect, report, server_and_model
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

URL, _ = server_and_model()
AGENT = "agent"
OBS = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)


def client() -> InferenceServerClient:
    return InferenceServerClient(URL.removeprefix("http://"))


def observation(*, binary: bool) -> InferInput:
    tensor = InferInput("obs", list(OBS.shape), "FP32")
    tensor.set_data_from_numpy(OBS, binary_data=binary)
    return tensor


def server_and_models_are_ready() -> None:
    server = client()
    expect(server.is_server_live() and server.is_server_ready())
    expect(server.is_model_ready(AGENT) and server.is_model_ready(AGENT, "1"))
    expect(not server.is_model_ready("other"))
    expect("binary_tensor_data" in server.get_server_metadata()["extensions"])


def a_signature_is_described() -> None:
    found = client().get_model_metadata(AGENT)
    expect(found["versions"] == ["1"], found)
    expect(found["inputs"] == [{"name": "obs", "datatype": "FP32", "shape": [-1, 4]}], found)


def json_and_bytes_are_the_same() -> None:
    server = client()
    arrays = []
    for binary in (True, False):
        outputs = [InferRequestedOutput(name, binary_data=binary) for name in ("logits", "value")]
        answer = server.infer(AGENT, [observation(binary=binary)], outputs=outputs, request_id="7")
        expect(answer.get_response()["id"] == "7", answer.get_response())
        arrays.append((answer.as_numpy("logits"), answer.as_numpy("value")))
    for sent, written in zip(*arrays, strict=True):
        expect(np.array_equal(sent, written), (sent, written))
    expect(arrays[0][0].shape == (5, 3) and arrays[0][0].dtype == np.float32, arrays)


def outputs_that_are_not_named_come_as_bytes() -> None:
    answer = client().infer(AGENT, [observation(binary=True)], model_version="1")
    expect(answer.get_response()["model_version"] == "1", answer.get_response())
    expect("parameters" in answer.get_output("value"), answer.get_response())
    expect(np.isfinite(answer.as_numpy("value")).all())


def requests_run_side_by_side() -> None:
    server = InferenceServerClient(URL.removeprefix("http://"), concurrency=4)
    waiting = [server.async_infer(AGENT, [observation(binary=True)]) for _ in range(16)]
    found = [request.get_result().as_numpy("logits") for request in waiting]
    expect(all(np.allclose(array, found[0], atol=1e-5) for array in found))


def the_language_model_takes_token_ids() -> None:
    ids = np.array([[5, 9, 11], [7, 8, 9]], np.int64)
    tensor = InferInput("input_ids", [2, 3], "INT64")
    tensor.set_data_from_numpy(ids)
    signature = {one["name"]: one["shape"] for one in client().get_model_metadata(MODEL)["outputs"]}
    answer = client().infer(MODEL, [tensor], outputs=[InferRequestedOutput(name) for name in signature])
    for name, shape in signature.items():
        found = answer.as_numpy(name)
        sizes = [axis if axis > 0 else size for axis, size in zip(shape, found.shape, strict=True)]
        expect(list(found.shape) == sizes and found.shape[0] == 2 and np.isfinite(found).all(), (name, found.shape))
    expect({"logits", "last_hidden_state", "pooled"} == set(signature), signature)


def mistakes_are_errors_with_words() -> None:
    wrong = InferInput("obs", [5, 4], "FP64")
    wrong.set_data_from_numpy(OBS.astype(np.float64))
    for name, tensor, words in ((AGENT, wrong, "FP64"), ("other", observation(binary=True), "other")):
        try:
            client().infer(name, [tensor])
        except InferenceServerException as error:
            expect(words in error.message(), error.message())
        else:
            expect(False, f"{words} was accepted")


if __name__ == "__main__":
    report(
        "tritonclient",
        [
            server_and_models_are_ready,
            a_signature_is_described,
            json_and_bytes_are_the_same,
            outputs_that_are_not_named_come_as_bytes,
            requests_run_side_by_side,
            the_language_model_takes_token_ids,
            mistakes_are_errors_with_words,
        ],
    )
