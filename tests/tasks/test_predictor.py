"""Logits, hidden states and pooled states of small models against forwards of one row."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.device.streams import DeviceStreams
from parallm.errors import ContextTooLong, EngineFull, InvalidRequest, NotFinite, Unavailable
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.load import load_shared_model
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.single import single_lora
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.tasks.encoder import Encoder
from parallm.tasks.predictor import Predictor
from parallm.tasks.settings import TaskSettings
from tests.learner.conftest import build_start
from tests.tasks.conftest import Device
from tests.tasks.tiny_folders import read, write_folder

ROWS = [[5, 9, 11, 3], [7], [100, 200, 300, 12, 13, 14]]
PLAIN = TaskSettings()
Make = Callable[..., Predictor]


def build(
    model: SharedModel,
    folder: Path,
    streams: DeviceStreams,
    settings: TaskSettings = PLAIN,
    *,
    adapters: Sequence[Adapter] = (),
    max_waiting: int = 9,
) -> Predictor:
    table, device = AdapterTable(), Device()
    for adapter in adapters:
        table.publish(adapter)
    encoder = Encoder(
        device,  # type: ignore[arg-type]
        streams,
        model,
        table,
        settings,
        folder,
        unit_tokens=16,
        max_waiting=9,
    )
    made = Predictor(
        device,  # type: ignore[arg-type]
        streams,
        model,
        table,
        encoder,
        max_context=32,
        max_waiting=max_waiting,
    )
    asyncio.run(made.prepare())
    return made


@pytest.fixture
def make(tiny_model: Callable[[str], Path], load_tiny: Callable[..., SharedModel], streams: DeviceStreams) -> Make:
    return partial(build, load_tiny("llama"), tiny_model("llama"), streams)


def padded(rows: Sequence[Sequence[int]], side: str = "right") -> dict[str, np.ndarray]:
    size = max(map(len, rows))
    ids, mask = (np.zeros((len(rows), size), np.int64) for _ in range(2))
    for index, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(size - len(row), size)
        ids[index, where], mask[index, where] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def predict(predictor: Predictor, inputs: Any, *names: str, model: str = "base") -> dict[str, np.ndarray]:
    return dict(asyncio.run(predictor.predict(model, inputs, names)))


def forward(model: SharedModel, row: Sequence[int], lora: Any = None) -> tuple[np.ndarray, np.ndarray]:
    hidden = model.hidden(mx.array([row]), model.make_cache(), lora)[0]
    return np.array(model.head(hidden).astype(mx.float32)), np.array(hidden.astype(mx.float32))


@pytest.mark.parametrize("side", ["left", "right"])
def test_states_are_those_of_a_forward_of_each_row(
    make: Make, load_tiny: Callable[..., SharedModel], side: str
) -> None:
    inputs = padded(ROWS, side)
    found = predict(make(), inputs, "logits", "last_hidden_state")
    assert found["logits"].shape == (3, 6, 385)
    for index, row in enumerate(ROWS):
        real = inputs["attention_mask"][index] == 1
        for name, expected in zip(("logits", "last_hidden_state"), forward(load_tiny("llama"), row), strict=True):
            np.testing.assert_allclose(found[name][index, real], expected, atol=1e-5)
            assert not found[name][index, ~real].any()


def test_an_adapter_has_states_of_its_own(make: Make, load_tiny: Callable[..., SharedModel]) -> None:
    model = load_tiny("llama")
    adapter = replace(build_start(model), name="poet", version=1)
    inputs = {"input_ids": np.array([ROWS[2]])}
    found = predict(make(adapters=[adapter]), inputs, "logits", model="poet@1")["logits"][0]
    lora = single_lora(dict(adapter.arrays), lora_scaling(adapter, model))
    np.testing.assert_allclose(found, forward(model, ROWS[2], lora)[0], atol=1e-5)


def test_a_row_alone_is_the_row_among_33(make: Make) -> None:
    chance = np.random.default_rng(0)
    rows = [chance.integers(1, 380, chance.integers(1, 20)).tolist() for _ in range(33)]
    predictor, inputs = make(), padded(rows)
    together = predict(predictor, inputs, "logits")["logits"]
    for index in (0, 16, 32):
        alone = predict(predictor, {"input_ids": np.array([rows[index]])}, "logits")["logits"][0]
        np.testing.assert_allclose(together[index, : len(rows[index])], alone, atol=1e-5)


def test_pooled_states_are_the_vectors(make: Make) -> None:
    predictor = make(TaskSettings(pooling="mean"))
    inputs = padded(ROWS)
    found = predict(predictor, inputs, "pooled", "last_hidden_state")
    for index, row in enumerate(ROWS):
        mean = found["last_hidden_state"][index, : len(row)].mean(axis=0)
        np.testing.assert_allclose(found["pooled"][index], mean / np.linalg.norm(mean), atol=1e-5)
    assert [spec.name for spec in make().signature("base").outputs] == ["logits", "last_hidden_state"]


def test_the_signature_has_the_sizes_of_the_model(make: Make) -> None:
    signature = make(TaskSettings(pooling="mean")).signature("base")
    assert [(spec.name, spec.datatype, spec.shape, spec.is_optional) for spec in signature.inputs] == [
        ("input_ids", "INT64", (-1, -1), False),
        ("attention_mask", "INT64", (-1, -1), True),
    ]
    assert [(spec.name, spec.datatype, spec.shape) for spec in signature.outputs] == [
        ("logits", "FP32", (-1, -1, 385)),
        ("last_hidden_state", "FP32", (-1, -1, 64)),
        ("pooled", "FP32", (-1, 64)),
    ]


def test_an_encoder_has_states_and_vectors_and_no_logits(streams: DeviceStreams, tmp_path: Path) -> None:
    folder = write_folder(read("bge_m3"), tmp_path / "model")
    model = load_shared_model(ModelSettings(path=str(folder), dtype="float32", lora=LoraSettings(rank=2)))
    predictor = build(model, folder, streams)
    assert [spec.name for spec in predictor.signature("base").outputs] == ["last_hidden_state", "pooled"]
    rows = [[3, 5, 6, 7, 0], [3, 8, 0]]
    found = predict(predictor, padded(rows), "last_hidden_state", "pooled")
    first = found["last_hidden_state"][:, 0]  # this model pools its first token
    expected = first / np.linalg.norm(first, axis=1, keepdims=True)
    np.testing.assert_allclose(found["pooled"], expected, atol=1e-5)
    alone = predict(predictor, {"input_ids": np.array([rows[1]])}, "last_hidden_state")["last_hidden_state"][0]
    np.testing.assert_allclose(found["last_hidden_state"][1, :3], alone, atol=1e-5)


def test_an_end_token_that_is_pooled_has_to_be_there(make: Make) -> None:
    predictor = make(TaskSettings(pooling="last", end_token="append"))
    with pytest.raises(InvalidRequest, match="this model's texts end with the token"):
        predict(predictor, {"input_ids": np.array([ROWS[0]])}, "pooled")


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[1, 2]], [[1]], r"attention_mask has the shape \[1, 1\], and input_ids \[1, 2\]"),
        ([[1, 2]], [[1, 2]], "0 and 1 alone"),
        ([[1, 2, 3]], [[1, 0, 1]], "row 0 should have its ones side by side"),
        ([[1, 2], [1, 2]], [[1, 1], [0, 0]], "row 1 should have its ones side by side, at least one"),
        ([[1, 385]], [[1, 1]], "from 0 to 384"),
        ([[-1, 2]], [[1, 1]], "from 0 to 384"),
    ],
)
def test_what_is_no_row_is_refused(make: Make, ids: Any, mask: Any, message: str) -> None:
    inputs = {"input_ids": np.array(ids), "attention_mask": np.array(mask)}
    with pytest.raises(InvalidRequest, match=message):
        predict(make(), inputs, "logits")


def test_padding_may_hold_any_ids_and_rows_have_to_fit_the_context(make: Make) -> None:
    inputs = {"input_ids": np.array([[5, -100]]), "attention_mask": np.array([[1, 0]])}
    assert predict(make(), inputs, "logits")["logits"].shape == (1, 2, 385)
    with pytest.raises(ContextTooLong, match="33 tokens and the model's maximum context length is 32"):
        predict(make(), {"input_ids": np.ones((1, 33), np.int64)}, "logits")


def test_numbers_that_are_not_finite_are_an_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = make()
    monkeypatch.setattr(SharedModel, "head", lambda self, hidden: mx.full((hidden.shape[0], 385), mx.nan))
    with pytest.raises(NotFinite, match="base computes values that are not finite: logits"):
        predict(predictor, {"input_ids": np.array([ROWS[0]])}, "logits")


def test_more_requests_than_may_wait_are_refused(make: Make) -> None:
    with pytest.raises(EngineFull):
        predict(make(max_waiting=0), {"input_ids": np.array([ROWS[0]])}, "logits")


def test_a_model_without_hidden_states_says_why(make: Make) -> None:
    predictor = make()
    predictor._fault = "it cannot be split into trunk and head"
    with pytest.raises(Unavailable, match="cannot be split"):
        predictor.signature("base")
