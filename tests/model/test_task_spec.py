"""Folders as sentence-transformers writes them; what is not understood is refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from parallm.errors import ModelError
from parallm.model.task_spec import adds_end_token, check_attention, from_json, read_task_spec, to_json
from parallm.types import TaskSpec

CHAIN = ("Transformer", "Pooling", "Normalize")
QWEN3 = {
    "word_embedding_dimension": 64,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_lasttoken": True,
    "include_prompt": True,
}


def write(
    folder: Path,
    pooling: Mapping[str, Any] = QWEN3,
    chain: tuple[str, ...] = CHAIN,
    *,
    sentences: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write the files of a folder, beside those that it has."""
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(chain)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps(dict(pooling)))
    if sentences is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(dict(sentences)))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def test_a_folder_without_modules_says_nothing(tmp_path: Path) -> None:
    assert read_task_spec(tmp_path) is None


def test_qwen3s_folder_is_read(tmp_path: Path) -> None:
    sentences = {"prompts": {"query": "Query:", "document": ""}, "default_prompt_name": None}
    found = read_task_spec(write(tmp_path, sentences=sentences))
    prompts = {"query": "Query:", "document": ""}
    assert found == TaskSpec(pooling=("last",), prompts=prompts, source="modules.json")


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode_weightedmean_tokens": True}, ("weighted_mean",)),
        ({"pooling_mode": "lasttoken"}, ("last",)),
        ({"pooling_mode": ["max", "mean"]}, ("max", "mean")),
    ],
)
def test_poolings_have_their_order(tmp_path: Path, pooling: dict[str, Any], expected: tuple[str, ...]) -> None:
    found = read_task_spec(write(tmp_path, pooling))
    assert found is not None
    assert found.pooling == expected


def test_without_normalize_vectors_keep_their_length(tmp_path: Path) -> None:
    found = read_task_spec(write(tmp_path, chain=CHAIN[:2]))
    assert found is not None
    assert not found.normalizes


@pytest.mark.parametrize(
    ("config", "expected"), [({}, None), ({"is_matryoshka": True}, ()), ({"matryoshka_dimensions": [64, 16]}, (16, 64))]
)
def test_sizes_are_those_that_the_model_was_trained_for(tmp_path: Path, config: dict[str, Any], expected: Any) -> None:
    found = read_task_spec(write(tmp_path, config=config))
    assert found is not None
    assert found.dimensions == expected


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"chain": ("Transformer", "Dense", "Pooling")}, "Transformer -> Dense -> Pooling"),
        ({"chain": ("Transformer", "Pooling", "Normalize", "Dense")}, "Pooling -> Normalize -> Dense"),
        ({"chain": ("Transformer", "Pooling", "Dense")}, "2_Dense/config.json"),
        ({"chain": ("Transformer",)}, "chains Transformer,"),
        ({"pooling": {"pooling_mode": "attention"}}, "'attention'"),
        ({"pooling": {"pooling_mode_new": True}}, "pooling_mode_new"),
        ({"pooling": {"pooling_mode_cls_token": False}}, "no mode"),
        ({"pooling": QWEN3 | {"include_prompt": False}, "sentences": {"prompts": {"query": "Q"}}}, "include_prompt"),
        ({"sentences": {"default_prompt_name": "query"}}, "'query'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read_task_spec(write(tmp_path, **fields))


def test_files_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    write(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[1]["path"] = "../elsewhere"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="out of its folder"):
        read_task_spec(tmp_path)


@pytest.mark.parametrize(
    "config",
    [{"is_causal": False}, {"use_bidirectional_attention": True}, {"architectures": ["LlamaBidirectionalModel"]}],
)
def test_a_model_that_looks_ahead_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="not causal"):
        check_attention(write(tmp_path, config=config))
    check_attention(write(tmp_path, config={"architectures": ["Qwen3ForCausalLM"]}))


def test_the_end_token_that_the_tokenizer_should_add(tmp_path: Path) -> None:
    assert not adds_end_token(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_eos_token": true}')
    assert adds_end_token(tmp_path)


def test_a_spec_comes_back_from_the_metadata_of_a_file() -> None:
    spec = TaskSpec(pooling=("mean", "last"), dimensions=(8, 16), prompts={"q": "Q: "}, source="modules.json")
    assert from_json(to_json(spec)) == spec
    for broken in ("{}", "[", '{"task": "score"}', to_json(spec).replace("mean", "attention")):
        with pytest.raises(ModelError):
            from_json(broken)


def test_the_length_that_a_model_was_trained_for_is_read(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256, "do_lower_case": False}))
    found = read_task_spec(tmp_path)
    assert found is not None
    assert found.max_tokens == 256
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    with pytest.raises(ModelError, match="do_lower_case"):
        read_task_spec(tmp_path)
    as_text = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"modality_config": as_text}))
    assert read_task_spec(tmp_path) is not None
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"modality_config": as_text | {"message": {}}}))
    with pytest.raises(ModelError, match="a message of the chat template"):
        read_task_spec(tmp_path)


BERT = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BERT, ("classify", ("cls",), "softmax", ("LABEL_0", "LABEL_1"))),
        (BERT | {"id2label": {"0": "LABEL_0"}}, ("score", ("cls",), "sigmoid", ("LABEL_0",))),
        (BERT | {"id2label": {"1": "b", "0": "a"}}, ("classify", ("cls",), "softmax", ("a", "b"))),
        (
            BERT | {"problem_type": "multi_label_classification"},
            ("classify", ("cls",), "sigmoid", ("LABEL_0", "LABEL_1")),
        ),
        (BERT | {"problem_type": "regression"}, ("classify", ("cls",), "none", ("LABEL_0", "LABEL_1"))),
        (BERT | {"problem_type": "regression", "id2label": {"0": "a"}}, ("score", ("cls",), "sigmoid", ("a",))),
        (
            BERT | {"problem_type": "regression", "sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}},
            ("classify", ("cls",), "sigmoid", ("LABEL_0", "LABEL_1")),
        ),
        (
            BERT | {"id2label": {"0": "a"}, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            ("score", ("cls",), "none", ("a",)),
        ),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            ("classify", ("last",), "softmax", ("LABEL_0", "LABEL_1")),
        ),
        (
            BERT | {"model_type": "modernbert", "classifier_pooling": "mean"},
            ("classify", ("mean",), "softmax", ("LABEL_0", "LABEL_1")),
        ),
    ],
)
def test_heads_of_folders_are_read(tmp_path: Path, config: dict[str, Any], expected: tuple[object, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_task_spec(tmp_path)
    assert found is not None
    assert (found.task, found.pooling, found.activation, found.labels) == expected
    assert from_json(to_json(found)) == found


def test_an_activation_that_is_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"activation_fn": "torch.nn.GELU"}))
    with pytest.raises(ModelError, match=r"config_sentence_transformers\.json: the activation 'torch\.nn\.GELU'"):
        read_task_spec(tmp_path)


def test_the_answers_of_a_language_model_are_read(tmp_path: Path) -> None:
    write(tmp_path, chain=("Transformer", "LogitScore"))
    (tmp_path / "1_LogitScore").mkdir()
    answers = tmp_path / "1_LogitScore/config.json"
    answers.write_text(json.dumps({"true_token_id": 9693, "false_token_id": 2152}))
    found = read_task_spec(tmp_path)
    assert found is not None
    assert (found.task, found.pooling, found.activation, found.answers) == ("score", ("last",), "sigmoid", (9693, 2152))
    answers.write_text(json.dumps({"false_token_id": 2152}))
    with pytest.raises(ModelError, match="true_token_id"):
        read_task_spec(tmp_path)


def test_older_metadata_of_adapters_is_read() -> None:
    old = {"task": "embed", "pooling": ["last"], "source": "modules.json", "normalizes": True, "dimensions": [16, 32]}
    found = from_json(json.dumps(old | {"prompts": {}, "default_prompt": None}))
    assert found == TaskSpec(pooling=("last",), source="modules.json", dimensions=(16, 32))
    with pytest.raises(ModelError, match="'rank'"):
        from_json(json.dumps(old | {"task": "rank"}))
