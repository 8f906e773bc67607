"""Vectors of small models against unpacked forwards, pooled by numpy."""

import asyncio
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from parallm.device.streams import DeviceStreams
from parallm.errors import EngineFull, InvalidRequest, ModelError, NotFinite, Unavailable
from parallm.learner.passes.packing import Segment, packed_hidden
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.files import read_adapter, write_exactly
from parallm.model.load import load_shared_model
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.single import single_lora
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.tasks.encoder import Encoder
from parallm.tasks.passes import neighbours
from parallm.tasks.settings import TaskSettings
from parallm.types import EncodeRequest, Pooling, TaskSpec
from tests.conftest import BLAS
from tests.learner.conftest import build_start
from tests.model.test_task_spec import write
from tests.tasks.conftest import MEAN, Row, encode

LENGTHS = (7, 1, 30, 12, 12, 2, 45, 3)


def make_rows(lengths: Sequence[int], seed: int = 5) -> list[Row]:
    chance = random.Random(seed)
    return [tuple(chance.randrange(3, 380) for _ in range(length)) for length in lengths]


def by_hand(model: SharedModel, rows: Sequence[Row], pooling: Pooling, adapter: Adapter | None = None) -> np.ndarray:
    lora = None if adapter is None else single_lora(dict(adapter.arrays), lora_scaling(adapter, model))
    vectors = []
    for row in rows:
        hidden_TH = model.hidden(mx.array([row]), model.make_cache(), lora)[0, ...].astype(mx.float32)
        states_TH = np.array(hidden_TH).astype(np.float64)
        vector_H = states_TH[-1] if pooling == "last" else states_TH.mean(axis=0)
        vectors.append(vector_H / np.linalg.norm(vector_H))
    return np.stack(vectors)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "mamba"])
def test_vectors_are_those_of_a_forward_for_each_text(
    make_encoder: Callable[..., Encoder], load_tiny: Callable[..., SharedModel], architecture: str, pooling: Pooling
) -> None:
    encoder, rows = make_encoder(architecture, TaskSettings(pooling=pooling, end_token="none")), make_rows(LENGTHS)
    assert encode(encoder, rows) == pytest.approx(by_hand(load_tiny(architecture), rows, pooling), abs=1e-5)


def test_rows_of_one_length_share_a_pass() -> None:
    sizes = [5, 9, 5, 9, 9, 5, 5]
    assert neighbours(sizes, 20, 1) == [[1, 3], [4, 0], [2, 5, 6]]
    assert neighbours([4] * 6, 1000, 2) == [[0, 1, 2], [3, 4, 5]], "each stream has work"
    assert neighbours([50], 20, 2) == [[0]]
    large = neighbours([1 + index % 190 for index in range(10_000)], 256, 2)
    assert sorted(index for one in large for index in one) == list(range(10_000))
    assert max(sum(1 + index % 190 for index in one) for one in large) <= 256


def test_an_adapter_has_vectors_of_its_own(
    make_encoder: Callable[..., Encoder], load_tiny: Callable[..., SharedModel]
) -> None:
    model, rows = load_tiny("llama"), make_rows(LENGTHS)
    adapter = build_start(model)
    encoder = make_encoder(adapters=[adapter])
    of_base = encode(encoder, rows)
    assert encode(encoder, rows, "policy@3") == pytest.approx(by_hand(model, rows, "mean", adapter), abs=1e-5)
    assert (encode(encoder, rows) == of_base).all()
    assert np.abs(encode(encoder, rows, "policy") - of_base).max() > 1e-2


@pytest.mark.parametrize("unit_tokens", [64, 4096])
def test_a_row_alone_is_the_row_among_33(
    make_encoder: Callable[..., Encoder], load_tiny: Callable[..., SharedModel], unit_tokens: int
) -> None:
    rows = make_rows(random.Random(2).choices(range(1, 60), k=33))
    encoder = make_encoder(unit_tokens=unit_tokens)
    together = encode(encoder, rows)
    alone = np.concatenate([encode(encoder, [row]) for row in rows])
    assert together == pytest.approx(alone, abs=0.0 if BLAS.strict else 1e-5)

    one_text = [Segment(prompt=len(rows[0]) + len(rows[1]))]  # the control: the second row sees the first
    mixed_MH = packed_hidden(load_tiny("llama"), mx.array([*rows[0], *rows[1]]), one_text, None)
    vector_H = np.array(mixed_MH[len(rows[0]) :].mean(axis=0))
    assert np.abs(vector_H / np.linalg.norm(vector_H) - alone[1]).max() > 1e-2


def test_units_are_bounded(make_encoder: Callable[..., Encoder], streams: DeviceStreams) -> None:
    encoder, rows = make_encoder(unit_tokens=16 * streams.width), make_rows([8] * 4 * streams.width)
    encode(encoder, rows)
    device: Any = encoder._device
    assert device.units[:-1] == [None, None]  # two rows of 8 tokens on each stream, twice


def test_vectors_are_cut_and_made_of_length_one_again(make_encoder: Callable[..., Encoder]) -> None:
    encoder, rows = make_encoder(), make_rows(LENGTHS)
    whole, raw = encode(encoder, rows, dimensions=64), encode(encoder, rows, activates=False)
    assert (whole == encode(encoder, rows)).all()
    expected = raw[:, :10] / np.linalg.norm(raw[:, :10], axis=1, keepdims=True)
    assert encode(encoder, rows, dimensions=10) == pytest.approx(expected, abs=1e-6)
    assert np.abs(np.linalg.norm(raw, axis=1) - 1).max() > 0.1


@pytest.mark.parametrize(
    ("settings", "dimensions", "named"),
    [
        (MEAN, 65, "have 64"),
        (TaskSettings(pooling="mean"), 10, "tasks.matryoshka=true"),
    ],
)
def test_other_sizes_are_refused(
    make_encoder: Callable[..., Encoder], settings: TaskSettings, dimensions: int, named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        encode(make_encoder(settings=settings), make_rows([3]), dimensions=dimensions)


def test_only_sizes_of_the_training_are_known(
    make_encoder: Callable[..., Encoder], load_tiny: Callable[..., SharedModel]
) -> None:
    task = TaskSpec(pooling=("mean", "max"), dimensions=(16, 32), source="test")
    encoder = make_encoder(settings=TaskSettings(), adapters=[replace(build_start(load_tiny("llama")), task=task)])
    assert encode(encoder, make_rows([3]), "policy", dimensions=32).shape == (1, 32)
    with pytest.raises(InvalidRequest, match="knows 16, 32, 128"):
        encode(encoder, make_rows([3]), "policy", dimensions=31)


def test_without_a_pooling_there_are_no_vectors(make_encoder: Callable[..., Encoder]) -> None:
    with pytest.raises(Unavailable, match=r"tasks\.pooling=last or mean"):
        make_encoder(settings=TaskSettings()).spec("base")


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def test_modules_of_the_folder_decide_unless_a_setting_does(
    make_encoder: Callable[..., Encoder], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = write(copied(tiny_model("llama"), tmp_path / "model"), {"pooling_mode_weightedmean_tokens": True})
    assert make_encoder(settings=TaskSettings(), folder=folder).spec("base").pooling == ("weighted_mean",)
    assert make_encoder(settings=MEAN, folder=folder).spec("base").pooling == ("mean",)
    write(folder, {"pooling_mode": "attention"})
    with pytest.raises(Unavailable, match="'attention'"):
        make_encoder(settings=TaskSettings(), folder=folder).spec("base")


def test_a_base_that_looks_ahead_is_refused_whatever_is_set(
    make_encoder: Callable[..., Encoder], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied(tiny_model("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    with pytest.raises(Unavailable, match="not causal"):
        make_encoder(settings=MEAN, folder=folder).spec("base")


def test_the_last_token_has_to_be_known(
    make_encoder: Callable[..., Encoder],
    tiny_model: Callable[[str], Path],
    load_tiny: Callable[..., SharedModel],
    tmp_path: Path,
) -> None:
    tokenizer = load_tiny("llama").tokenizer
    plain, end = tokenizer.encode("2 + 3"), tokenizer.end_token
    with pytest.raises(Unavailable, match=r"tasks\.end_token=append"):
        make_encoder(settings=TaskSettings(pooling="last")).spec("base")
    none = make_encoder(settings=TaskSettings(pooling="last", end_token="none"))
    assert (none.encode_text("2 + 3", none.spec("base")), none.end_token(none.spec("base"))) == (plain, None)
    appends = make_encoder(settings=TaskSettings(pooling="last", end_token="append"))
    assert (appends.encode_text("2 + 3", appends.spec("base")), appends.end_token(appends.spec("base"))) == (
        (*plain, end),
        end,
    )

    folder = copied(tiny_model("llama"), tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_eos_token": True}))
    told = make_encoder(settings=TaskSettings(pooling="last"), folder=folder)
    assert told.encode_text("2 + 3", told.spec("base")) == (*plain, end)
    assert (none.appended_token, appends.appended_token, told.appended_token) == (None, end, end)

    spec = TaskSpec(pooling=("last",), end_token=end, source="learner=embedding")
    trained = make_encoder(adapters=[replace(build_start(load_tiny("llama")), task=spec)])
    assert trained.encode_text("2 + 3", trained.spec("policy")) == (*plain, end), "as it was trained, without a key"
    assert trained.end_token(trained.spec("policy")) == end


def test_a_tokenizer_that_ends_texts_itself_is_followed(
    make_encoder: Callable[..., Encoder], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied(tiny_model("llama"), tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    pad = next(one for one in tokenizer["added_tokens"] if one["content"] == "<|pad|>")["id"]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|pad|>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|pad|>": {"id": "<|pad|>", "ids": [pad], "tokens": ["<|pad|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = load_shared_model(ModelSettings(path=str(folder), lora=LoraSettings(rank=4)))
    encoder = make_encoder(settings=TaskSettings(pooling="last"), folder=folder, model=model)
    assert encoder.end_token(encoder.spec("base")) == pad != model.tokenizer.end_token
    assert encoder.appended_token is None
    assert encoder.encode_text("2 + 3", encoder.spec("base")) == model.tokenizer.encode("2 + 3")
    assert encoder.encode_text("2 + 3", encoder.spec("base"))[-1] == pad


def test_an_adapter_that_sentence_transformers_saved_says_itself_how_it_pools(
    make_encoder: Callable[..., Encoder], load_tiny: Callable[..., SharedModel], tmp_path: Path
) -> None:
    model = load_tiny("llama")
    write_exactly(build_start(model), tmp_path / "given", num_layers=model.num_layers, base_name="tiny")
    write(tmp_path / "given", {"pooling_mode_max_tokens": True}, sentences={"prompts": {"query": "Query: "}})
    given = read_adapter(tmp_path / "given", model.targets)
    expected = TaskSpec(pooling=("max",), prompts={"query": "Query: "}, source="modules.json")
    assert given.task == expected

    write_exactly(given, tmp_path / "kept", num_layers=model.num_layers, base_name="tiny")
    kept = read_adapter(tmp_path / "kept", model.targets)
    assert (kept.task, kept.digest) == (expected, given.digest)
    encoder = make_encoder(settings=TaskSettings(), adapters=[kept])
    assert encoder.spec("policy") == expected
    with pytest.raises(Unavailable):
        encoder.spec("base")


def test_what_is_not_finite_is_an_error(make_encoder: Callable[..., Encoder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallm.tasks.passes.pool", lambda hidden, lengths, _: mx.full((len(lengths), 64), mx.nan))
    with pytest.raises(NotFinite):
        encode(make_encoder(), make_rows([3]))


def test_more_requests_than_may_wait_are_refused(make_encoder: Callable[..., Encoder]) -> None:
    encoder = make_encoder(max_waiting=1)
    encode(encoder, make_rows([3]))
    encoder._num_waiting = 1
    with pytest.raises(EngineFull):
        encode(encoder, make_rows([3]))


DENSE_CHAIN = ("Transformer", "Pooling", "Dense", "Dense", "Normalize")
MEAN_POOLING = {"pooling_mode_mean_tokens": True}


def write_dense(folder: Path, shapes: Sequence[tuple[int, int]], activations: Sequence[str]) -> list[dict[str, Any]]:
    """Write a folder for each layer, as sentence-transformers does; the second one has no bias."""
    chance, layers = np.random.default_rng(2), []
    for index, (shape, activation) in enumerate(zip(shapes, activations, strict=True), start=2):
        place = folder / f"{index}_Dense"
        place.mkdir()
        arrays = {"linear.weight": chance.normal(size=shape).astype(np.float32) / 8}
        if index == 2:
            arrays["linear.bias"] = chance.normal(size=shape[0]).astype(np.float32)
        save_file(arrays, place / "model.safetensors")
        config = {"in_features": shape[1], "out_features": shape[0], "activation_function": activation}
        (place / "config.json").write_text(json.dumps(config))
        layers.append(arrays)
    return layers


@pytest.fixture
def dense_folder(tiny_model: Callable[[str], Path], tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "dense")
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    names = ("torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity")
    layers = write_dense(folder, ((24, hidden), (10, 24)), names)
    return write(folder, MEAN_POOLING, DENSE_CHAIN), layers


def test_vectors_go_through_the_dense_modules(
    make_encoder: Callable[..., Encoder], dense_folder: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, (first, second) = dense_folder
    rows = make_rows(LENGTHS)
    pooled = encode(make_encoder(settings=TaskSettings(pooling="mean")), rows, activates=False).astype(np.float64)
    wide = np.tanh(pooled @ first["linear.weight"].T + first["linear.bias"]) @ second["linear.weight"].T
    expected = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    encoder = make_encoder(settings=TaskSettings(), folder=folder)
    assert encode(encoder, rows) == pytest.approx(expected, abs=1e-5)
    alone = np.concatenate([encode(encoder, [row]) for row in rows])
    assert alone == pytest.approx(expected, abs=1e-5)
    assert np.abs(encode(make_encoder(settings=TaskSettings(pooling="mean")), rows)[:, :10] - expected).max() > 0.01
    with pytest.raises(InvalidRequest, match="dimensions is 11, and vectors of base have 10"):
        encode(encoder, rows, dimensions=11)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "2_Dense/model.safetensors").unlink(), "2_Dense has no model.safetensors"),
        (lambda folder: (folder / "2_Dense/model.safetensors").write_bytes(b"x"), "2_Dense cannot be read"),
        (lambda folder: shutil.copy(folder / "3_Dense/model.safetensors", folder / "2_Dense"), "2_Dense takes 24 numb"),
        (
            lambda folder: (folder / "3_Dense/config.json").write_text('{"activation_function": "a.Mish"}'),
            "activation mish.*tanh, gelu, relu, identity",
        ),
        (
            lambda folder: (folder / "3_Dense/config.json").write_text('{"module_input_name": "token_embeddings"}'),
            "token_embeddings",
        ),
    ],
)
def test_dense_modules_that_are_not_known_are_named(
    make_encoder: Callable[..., Encoder],
    dense_folder: tuple[Path, list[dict[str, Any]]],
    damage: Callable[[Path], object],
    reason: str,
) -> None:
    damage(dense_folder[0])
    with pytest.raises(ModelError, match=reason):
        encode(make_encoder(settings=TaskSettings(), folder=dense_folder[0]), make_rows((3,)))


@pytest.mark.parametrize("architecture", ["llama", "mamba"])
def test_each_token_has_its_vector(
    make_encoder: Callable[..., Encoder], load_tiny: Callable[..., SharedModel], architecture: str
) -> None:
    encoder, rows, model = make_encoder(architecture), make_rows(LENGTHS), load_tiny(architecture)
    states = asyncio.run(encoder.encode_tokens(EncodeRequest(model="base", rows=tuple(rows)), max_bytes=1 << 20))
    assert [len(state_TD) for state_TD in states] == [len(row) for row in rows]
    for row, state_TD in zip(rows, states, strict=True):
        hidden_TH = np.array(model.hidden(mx.array([row]), model.make_cache(), None)[0, ...].astype(mx.float32))
        assert state_TD == pytest.approx(hidden_TH / np.linalg.norm(hidden_TH, axis=1, keepdims=True), abs=1e-5)
    short = EncodeRequest(model="base", rows=tuple(rows), dimensions=4, activates=False)
    cut = asyncio.run(encoder.encode_tokens(short, max_bytes=1 << 20))
    assert cut[0] == pytest.approx(
        np.array(model.hidden(mx.array([rows[0]]), model.make_cache(), None)[0, :, :4]), abs=1e-5
    )


def test_tokens_have_no_vectors_behind_dense_modules_and_none_beyond_the_limit(
    make_encoder: Callable[..., Encoder], dense_folder: tuple[Path, list[dict[str, Any]]]
) -> None:
    request = EncodeRequest(model="base", rows=tuple(make_rows((3, 5))))
    encoder = make_encoder(settings=TaskSettings(), folder=dense_folder[0])
    with pytest.raises(InvalidRequest, match="layers behind its pooling, so there is none for each token"):
        asyncio.run(encoder.encode_tokens(request, max_bytes=1 << 20))
    with pytest.raises(InvalidRequest, match=r"the limit is 100; send fewer texts, or raise server.max_answer_bytes"):
        asyncio.run(make_encoder().encode_tokens(request, max_bytes=100))
