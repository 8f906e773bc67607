"""Vectors, scores and labels of tiny folders against the numbers of transformers and sentence-transformers."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from transformers import AutoTokenizer

from parallm.device.streams import DeviceStreams
from parallm.engine.engine import Engine
from parallm.engine.settings import EngineSettings
from parallm.errors import ContextTooLong, InvalidRequest, Unavailable
from parallm.model.adapters.files import read_adapter, write_exactly
from parallm.model.adapters.table import AdapterTable
from parallm.model.encoders import bert, modernbert
from parallm.model.load import load_shared_model
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.server.tasks.texts import Chosen, Cut, Side, read_rows
from parallm.tasks.encoder import Encoder
from parallm.tasks.settings import TaskSettings
from parallm.types import EncodeRequest, GenerationRequest, SamplingParams
from tests.conftest import BLAS, IS_INTEL
from tests.learner.conftest import build_start
from tests.tasks.conftest import Row, build_encoder, encode
from tests.tasks.tiny_folders import NAMES, read, write_folder

MAX_ERROR = 1e-5
AS_FILES_SAY = TaskSettings()
ASKS = TaskSettings(score_template="qwen3_reranker")
OF_TASK = {
    task: [name for name in NAMES if read(name)["task"] == task] for task in ("embed", "score", "classify", "answer")
}


@dataclass(frozen=True, slots=True)
class Tiny:
    reference: dict[str, Any]
    model: SharedModel
    encoder: Encoder


Open = Callable[..., Tiny]


@pytest.fixture
def open_tiny(streams: DeviceStreams, tmp_path: Path) -> Open:
    def open_reference(name: str, settings: TaskSettings = AS_FILES_SAY, **options: Any) -> Tiny:
        reference = read(name)
        folder = write_folder(reference, tmp_path / name)
        model = load_shared_model(ModelSettings(path=str(folder), dtype="float32", lora=LoraSettings(rank=2)))
        return Tiny(reference, model, build_encoder(model, folder, streams, settings, **options))

    return open_reference


def texts_of(tiny: Tiny, texts: Sequence[str]) -> list[Row]:
    return [tiny.encoder.encode_text(text, tiny.encoder.spec("base")) for text in texts]


def pairs_of(tiny: Tiny) -> list[tuple[Row, int]]:
    spec, pairs = tiny.encoder.spec("base"), tiny.reference["pairs"]
    return [tiny.encoder.encode_pairs(spec, query, [text], limit=200)[0] for query, text in pairs]


def score(tiny: Tiny, **fields: Any) -> np.ndarray:
    pairs = pairs_of(tiny)
    request = EncodeRequest(
        model="base", rows=tuple(row for row, _ in pairs), first_lengths=tuple(first for _, first in pairs), **fields
    )
    return asyncio.run(tiny.encoder.encode(request))[:, 0]


def error(found: np.ndarray, expected: Any) -> float:
    return float(np.abs(found - np.array(expected)).max())


@pytest.mark.parametrize("name", OF_TASK["embed"])
def test_vectors_are_those_of_sentence_transformers(
    open_tiny: Open, name: str, record_property: Callable[[str, object], None]
) -> None:
    tiny = open_tiny(name)
    worst = error(encode(tiny.encoder, texts_of(tiny, tiny.reference["texts"])), tiny.reference["vectors"])
    if "prompted" in tiny.reference:
        prompt = tiny.encoder.spec("base").prompts[tiny.reference["prompt_name"]]
        rows = texts_of(tiny, [prompt + text for text in tiny.reference["texts"]])
        worst = max(worst, error(encode(tiny.encoder, rows), tiny.reference["prompted"]))
    record_property("tasks.worst_embedding_error", worst)
    assert worst <= MAX_ERROR


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", [name for name in NAMES if read(name)["task"] != "answer"])
def test_a_text_is_cut_as_transformers_cuts_it(open_tiny: Open, tmp_path: Path, name: str, side: Side) -> None:
    tiny, text = open_tiny(name), "the red tree is not in the river for the dog of the cat " * 2
    spec, appended = tiny.encoder.spec("base"), tiny.encoder.appended_token
    end = () if appended is None or spec.task != "embed" else (appended,)
    theirs = AutoTokenizer.from_pretrained(tmp_path / name, truncation_side=side)
    engine, chosen = SimpleNamespace(max_context=512), Chosen(model="base", spec=spec, encoder=tiny.encoder)
    service: Any = SimpleNamespace(engine=engine, tokenizer=tiny.model.tokenizer)
    for tokens in (3, 8):
        expected = theirs(text, truncation=True, max_length=tokens - len(end))["input_ids"]
        assert read_rows(service, chosen, [text], Cut(tokens=tokens, side=side)) == ((*expected, *end),)


@pytest.mark.parametrize("name", ["e5", "bge_m3"])
def test_what_pads_a_row_reads_no_position_beyond_the_table(open_tiny: Open, name: str) -> None:
    tiny = open_tiny(name)
    embeddings, length = tiny.model.base.embeddings, tiny.model.max_context
    table = embeddings.position_embeddings
    beyond = mx.full((48, table.weight.shape[1]), mx.nan)  # in the same buffer, where an index too large would read
    table.weight = mx.contiguous(mx.concatenate([table.weight, beyond]))[: len(table.weight)]
    assert mx.isfinite(embeddings(mx.zeros((1, length + 15), mx.int32), None)).all()


@pytest.mark.parametrize("name", OF_TASK["score"])
def test_scores_of_pairs_are_those_of_a_cross_encoder(
    open_tiny: Open, name: str, record_property: Callable[[str, object], None]
) -> None:
    tiny = open_tiny(name)
    worst = max(
        error(score(tiny), tiny.reference["scores"]), error(score(tiny, activates=False), tiny.reference["logits"])
    )
    record_property("tasks.worst_embedding_error", worst)
    assert worst <= MAX_ERROR


@pytest.mark.parametrize("name", OF_TASK["answer"])
def test_a_yes_or_no_is_scored_as_the_model_card_says(
    open_tiny: Open, name: str, record_property: Callable[[str, object], None]
) -> None:
    """One folder has a head of its own, one that of its embeddings."""
    tiny = open_tiny(name, ASKS)
    worst = max(
        error(score(tiny), tiny.reference["scores"]), error(score(tiny, activates=False), tiny.reference["logits"])
    )
    record_property("tasks.worst_embedding_error", worst)
    assert worst <= MAX_ERROR
    assert np.ptp(tiny.reference["scores"]) > 0.01  # the control: scores that are all alike would show nothing


@pytest.mark.parametrize("name", OF_TASK["classify"])
def test_labels_are_those_of_transformers(
    open_tiny: Open, name: str, record_property: Callable[[str, object], None]
) -> None:
    tiny = open_tiny(name)
    rows = texts_of(tiny, tiny.reference["texts"])
    worst = max(
        error(encode(tiny.encoder, rows), tiny.reference["probabilities"]),
        error(encode(tiny.encoder, rows, activates=False), tiny.reference["logits"]),
    )
    record_property("tasks.worst_embedding_error", worst)
    assert worst <= MAX_ERROR
    assert tiny.encoder.spec("base").labels == ("bad", "so", "good")


@pytest.mark.parametrize(
    ("name", "module", "attribute", "wrong"),
    [
        ("e5", bert, "ACTIVATIONS", {"gelu": nn.gelu_approx}),
        ("bge_m3", bert, "first_position", lambda config: 0),
        ("modernbert", modernbert, "layer_kinds", lambda config: ["full_attention"] * 3),
        ("modernbert", modernbert, "theta", lambda config, kind: 10_000.0),
    ],
)
def test_what_encoders_are_often_wrong_in_shows(
    open_tiny: Open, name: str, module: Any, attribute: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the numbers above: GELU by tanh, positions from zero, no windows, one theta."""
    monkeypatch.setattr(module, attribute, wrong)
    tiny = open_tiny(name)
    assert error(encode(tiny.encoder, texts_of(tiny, tiny.reference["texts"])), tiny.reference["vectors"]) > MAX_ERROR


def test_the_second_text_has_a_type_of_its_own(open_tiny: Open) -> None:
    """The control: as one text a pair has other logits."""
    tiny = open_tiny("bert_reranker")
    rows = [row for row, _ in pairs_of(tiny)]
    assert error(encode(tiny.encoder, rows, activates=False)[:, 0], tiny.reference["logits"]) > 1e-3


@pytest.mark.parametrize("name", ["e5", "modernbert", "modernbert_classifier", "bert_reranker"])
def test_a_row_of_an_encoder_alone_is_the_row_among_33(open_tiny: Open, name: str) -> None:
    tiny, chance = open_tiny(name), np.random.RandomState(7)
    rows = [tuple(chance.randint(5, 40, size=length).tolist()) for length in chance.randint(1, 60, size=33)]
    together = encode(tiny.encoder, rows)
    alone = np.concatenate([encode(tiny.encoder, [row]) for row in rows])
    assert together == pytest.approx(alone, abs=MAX_ERROR)


def test_an_encoder_is_a_lora_target(open_tiny: Open) -> None:
    names = open_tiny("e5").model.targets
    assert "encoder.layer.0.attention.self.query" in names
    assert "layers.1.attn.Wqkv" in open_tiny("modernbert").model.targets
    assert not any("embeddings" in name for name in names)


def test_the_context_of_roberta_is_shorter_than_its_positions(open_tiny: Open) -> None:
    assert open_tiny("bge_m3").model.max_context == 64


@pytest.mark.parametrize(
    ("name", "writes"), [("e5", False), ("e5_mistral", False), ("qwen3_classifier", False), ("qwen3_embedding", True)]
)
def test_what_has_no_head_for_text_is_known(open_tiny: Open, name: str, writes: bool) -> None:
    assert open_tiny(name).model.writes_text is writes


def test_qwen3_embedding_may_be_cut_to_any_size(open_tiny: Open) -> None:
    tiny = open_tiny("qwen3_embedding")
    rows = texts_of(tiny, tiny.reference["texts"])
    assert encode(tiny.encoder, rows, dimensions=5).shape == (4, 5)


def test_the_query_of_a_rerank_is_computed_once(open_tiny: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = open_tiny("qwen3_reranker", ASKS, unit_tokens=4096)
    computed: list[int] = []
    hidden = SharedModel.hidden

    def counted(self: SharedModel, tokens_BT: mx.array, cache: Any, lora: Any) -> mx.array:
        computed.append(tokens_BT.size)
        return hidden(self, tokens_BT, cache, lora)

    monkeypatch.setattr(SharedModel, "hidden", counted)
    together = score(tiny)
    computed_once = sum(computed)
    num_tokens = sum(len(row) for row, _ in pairs_of(tiny))
    assert computed_once < 0.8 * num_tokens
    assert error(together, tiny.reference["scores"]) <= MAX_ERROR


def test_a_score_is_the_softmax_of_two_columns(open_tiny: Open) -> None:
    tiny = open_tiny("qwen3_reranker_untied", ASKS)
    spec = tiny.encoder.spec("base")
    row, _ = pairs_of(tiny)[0]
    logits_TV = tiny.model.base(mx.array([row]), cache=tiny.model.make_cache())[0, ...]
    both = np.array(mx.softmax(logits_TV[-1][mx.array(spec.answers)].astype(mx.float32)))
    assert encode(tiny.encoder, [row])[0, 0] == pytest.approx(both[0], abs=1e-6)


QWEN = "qwen3_reranker"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (TaskSettings(score_template="qwen4"), "qwen3_reranker, mxbai_rerank_v2"),
        (TaskSettings(score_template="{document} {query}", score_tokens=("yes",)), "should come after"),
        (TaskSettings(score_template="{query} {document}"), "one or two words"),
        (TaskSettings(score_template="{query} {document}", score_tokens=("yes", "big cat")), "'big cat' has 2 tokens"),
        (TaskSettings(score_tokens=("yes", "no")), "set tasks.score_template"),
        (TaskSettings(score_template=QWEN, pooling="mean"), "set one of the two"),
        (TaskSettings(), "tasks.pooling=last or mean"),
    ],
)
def test_a_text_of_pairs_that_says_nothing_is_refused_with_what_would(
    open_tiny: Open, settings: TaskSettings, named: str
) -> None:
    with pytest.raises(Unavailable, match=re.escape(named)):
        open_tiny(QWEN, settings).encoder.spec("base")


def test_answers_without_a_text_are_refused(open_tiny: Open, tmp_path: Path) -> None:
    yes, no = open_tiny(QWEN, ASKS).encoder.spec("base").answers
    folder = tmp_path / QWEN
    chain = [{"path": "", "type": "a.Transformer"}, {"path": "1_LogitScore", "type": "a.LogitScore"}]
    (folder / "modules.json").write_text(json.dumps(chain))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore/config.json").write_text(json.dumps({"true_token_id": yes, "false_token_id": no}))
    with pytest.raises(Unavailable, match=r"set tasks\.score_template to qwen3_reranker or"):
        open_tiny(QWEN).encoder.spec("base")
    tiny = open_tiny(QWEN, ASKS)
    assert error(score(tiny), tiny.reference["scores"]) <= MAX_ERROR


def test_only_the_document_of_a_pair_is_cut(open_tiny: Open) -> None:
    tiny = open_tiny(QWEN, ASKS)
    spec, tokenizer = tiny.encoder.spec("base"), tiny.model.tokenizer
    (whole, first), (short, _) = tiny.encoder.encode_pairs(spec, "what runs", ["the cat " * 30, "fish"], limit=200)
    after = len(short) - first - 1
    ((cut, _),) = tiny.encoder.encode_pairs(spec, "what runs", ["the cat " * 30], limit=first + after + 3, cuts=True)
    assert cut == (*whole[: first + 3], *whole[len(whole) - after :])
    ((cut, _),) = tiny.encoder.encode_pairs(spec, "what runs", ["the cat " * 30], limit=200, document_limit=2)
    assert cut == (*whole[: first + 2], *whole[len(whole) - after :])
    with pytest.raises(ContextTooLong, match="truncate_prompt_tokens=-1") as too_long:
        tiny.encoder.encode_pairs(spec, "what runs", ["the cat " * 30], limit=first + after + 3)
    assert too_long.value.parameter == "documents"
    with pytest.raises(ContextTooLong, match="shorten the query") as too_long:
        tiny.encoder.encode_pairs(spec, "what runs " * 20, ["fish"], limit=first, cuts=True)
    assert too_long.value.parameter == "query"
    assert tokenizer.encode_more("fish")[0] in short


def test_texts_of_a_pair_cannot_write_the_template(open_tiny: Open) -> None:
    tiny = open_tiny(QWEN, ASKS)
    spec, end = tiny.encoder.spec("base"), tiny.model.tokenizer.encode_more("<|im_end|>")[0]
    ((row, _),) = tiny.encoder.encode_pairs(spec, "{document} <|im_end|>", ["a <|im_end|>"], limit=400)
    assert row.count(end) == 2, "those of the template"
    ((other, _),) = tiny.encoder.encode_pairs(spec, "what", ["a {query}"], limit=400)
    assert other.count(tiny.model.tokenizer.encode_more("what")[0]) == 1


def test_an_instruction_replaces_that_of_the_family(open_tiny: Open) -> None:
    tiny = open_tiny(QWEN, ASKS)
    spec = tiny.encoder.spec("base")
    ((usual, _),) = tiny.encoder.encode_pairs(spec, "fish", ["a"], limit=400)
    ((other, _),) = tiny.encoder.encode_pairs(spec, "fish", ["a"], instruction="small cat", limit=400)
    assert usual != other
    plain = replace(spec, template="{query} {document}")
    with pytest.raises(InvalidRequest, match="no place for an instruction"):
        tiny.encoder.encode_pairs(plain, "fish", ["a"], instruction="small cat", limit=400)


@pytest.mark.parametrize("unit_tokens", [64, 4096])
def test_a_scored_pair_alone_is_the_pair_among_33(open_tiny: Open, unit_tokens: int) -> None:
    """With what all begin with computed once; alone it is computed as a whole."""
    tiny, chance = open_tiny(QWEN, ASKS, unit_tokens=unit_tokens), np.random.RandomState(3)
    spec = tiny.encoder.spec("base")
    words, sizes = ["cat", "dog", "fish", "tree"], chance.randint(1, 40, size=33)
    texts = [" ".join(chance.choice(words, size=size)) for size in sizes]
    rows = [row for row, _ in tiny.encoder.encode_pairs(spec, "what runs", texts, limit=400)]
    together = encode(tiny.encoder, rows, activates=False)
    alone = np.concatenate([encode(tiny.encoder, [row], activates=False) for row in rows])
    is_exact = BLAS.strict and IS_INTEL
    assert together == pytest.approx(alone, abs=0.0 if is_exact else MAX_ERROR)


def test_an_adapter_of_an_encoder_has_vectors_of_its_own(open_tiny: Open, tmp_path: Path) -> None:
    tiny = open_tiny("e5")
    start = build_start(tiny.model)
    write_exactly(start, tmp_path / "adapter", num_layers=2, base_name="e5")
    found = read_adapter(tmp_path / "adapter", tiny.model.targets, model_type="bert")
    assert found.digest == start.digest
    both = open_tiny("e5", adapters=[found])
    rows = texts_of(tiny, tiny.reference["texts"])
    assert error(encode(both.encoder, rows), tiny.reference["vectors"]) <= MAX_ERROR
    assert error(encode(both.encoder, rows, "policy"), tiny.reference["vectors"]) > 1e-3


@pytest.mark.parametrize("name", ["e5", "e5_mistral", "qwen3_classifier"])
def test_a_request_for_text_is_told_which_routes_there_are(open_tiny: Open, streams: DeviceStreams, name: str) -> None:
    engine = Engine(
        open_tiny(name).model,
        AdapterTable(),
        streams,
        EngineSettings(kv_cache_bytes=1 << 20),
        emit=lambda events: None,
        report=lambda ids, error: None,
    )
    sampling = SamplingParams(max_tokens=1)
    request = GenerationRequest(request_id="1", prompt_tokens=(5, 6), sampling=sampling, model="base")
    with pytest.raises(InvalidRequest, match=r"/v1/embeddings, /rerank or /score, /classify"):
        engine.add(request, False)
