import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model

from parallm.errors import AdapterError, ModelError
from parallm.model.load import NANO, UNBOUNDED, _reason, check_local, find_folder, load_shared_model, max_positions
from parallm.model.lora.single import LoraScaling, single_lora
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel

TOKENS = [[5, 300, 17, 9, 44, 2]]


@pytest.fixture
def folder(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def load(path: Path | str, **settings: Any) -> SharedModel:
    return load_shared_model(ModelSettings(path=str(path), **settings))


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def logits(model: SharedModel) -> mx.array:
    return model.head(model.hidden(mx.array(TOKENS), model.make_cache(), None)[0])


def test_the_embedded_model_needs_no_path() -> None:
    model = load("nano")
    assert (model.dtype, model.is_batch_invariant, model.num_layers) == (mx.float32, True, 4)
    assert find_folder("nano") == NANO


def test_the_base_is_frozen(folder: Path) -> None:
    assert tree_flatten(load(folder).base.trainable_parameters()) == []


@pytest.mark.parametrize(
    "architecture", ["llama", "gemma3_text", "cohere", "granite", "gpt2", "gpt_neox", "mixtral", "mamba", "jamba"]
)
def test_trunk_and_head_make_the_same_logits_as_the_whole_model(
    architecture: str, tiny_model: Callable[[str], Path], load_tiny: Callable[..., SharedModel]
) -> None:
    model = load_tiny(architecture)
    assert model.trunk_owner is not None
    plain, _ = load_model(tiny_model(architecture))
    assert mx.allclose(logits(model), plain(mx.array(TOKENS))[0], atol=1e-4, rtol=1e-5).item()


def test_a_model_whose_head_cannot_be_separated_is_used_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(load(folder))
    monkeypatch.setattr("parallm.model.load.find_trunk", lambda base: (base, "lm_head"))
    model = load(folder)
    assert model.trunk_owner is None
    assert "cannot be separated" in caplog.text
    assert mx.allclose(logits(model), expected, atol=1e-5).item()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_dtype_can_be_chosen(folder: Path, dtype: str) -> None:
    model = load(folder, dtype=dtype)
    assert model.dtype == getattr(mx, dtype)
    assert logits(model).dtype == getattr(mx, dtype)
    assert mx.allclose(logits(model).astype(mx.float32), logits(load(folder)), atol=0.5, rtol=0.1).item()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_model_takes_adapters(folder: Path, bits: int) -> None:
    base, _ = load_model(folder)
    nn.quantize(base, group_size=32, bits=bits)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(base.parameters())))
    change_config(folder, quantization={"group_size": 32, "bits": bits})
    model = load(folder, lora=LoraSettings(rank=4))
    assert model.targets["model.layers.1.mlp.down_proj"] == (96, 64)
    assert mx.allclose(logits(model), base(mx.array(TOKENS))[0], atol=1e-4).item()
    shapes = {name: ((inputs, 4), (4, outputs)) for name, (inputs, outputs) in model.targets.items()}
    arrays = {f"{name}.lora_a": mx.full(a, 0.01) for name, (a, _) in shapes.items()}
    arrays |= {f"{name}.lora_b": mx.full(b, 0.01) for name, (_, b) in shapes.items()}
    scaling = LoraScaling(dict.fromkeys(shapes, 2.0), {})
    hidden = model.hidden(mx.array(TOKENS), model.make_cache(), single_lora(arrays, scaling))
    assert not mx.allclose(model.head(hidden[0]), logits(model), atol=1e-3).item()


def test_the_context_has_another_name_in_older_architectures(load_tiny: Callable[..., SharedModel]) -> None:
    assert [load_tiny(name).max_context for name in ("llama", "gpt2", "gpt_bigcode")] == [512, 512, 512]


def test_a_config_that_leaves_the_vocabulary_to_its_default_loads(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mixtral", "num_local_experts": 2}
    del config["vocab_size"]
    model_class, arguments_class = _get_classes(config)
    arrays = dict(tree_flatten(model_class(arguments_class.from_dict(config)).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).vocabulary_size == 32000


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/no/such/folder", "no such folder; give a folder with config.json"),
        ("./absent", "no such folder"),
        ("absent", "or 'nano'"),
        ("a b/c", "neither a folder nor a hub id"),
    ],
)
def test_a_path_that_is_nothing_is_refused(path: str, reason: str) -> None:
    with pytest.raises(ModelError, match=rf"model.path={path}.*{reason}"):
        load(path)


def test_a_hub_id_without_network_says_how_to_name_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"Without network.*model.path=/path/to/folder"):
        load("someone/some-model-that-nobody-has")


def test_what_is_wrong_with_a_folder_is_seen_before_anything_is_loaded(folder: Path) -> None:
    check_local("nano")
    check_local("someone/a-hub-id")
    check_local(str(folder))
    (folder / "model.safetensors").unlink()
    for path, reason in ((folder, "has no model"), (folder / "x", "no such folder")):
        with pytest.raises(ModelError, match=reason):
            check_local(str(path))


def test_a_reason_that_is_too_long_is_cut_between_sentences() -> None:
    sentences = [f"{word} is missing in a place that takes some words to describe." for word in map(str, range(30))]
    reason = _reason(ValueError("\n".join(sentences)))
    assert reason == " ".join(sentences[: len(reason.split(". "))])
    assert 400 < len(reason) < 520
    assert len(_reason(ValueError("a tensor, " * 1000))) < 1100


def test_a_folder_without_a_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config.json"):
        load(folder)


@pytest.mark.parametrize("text", ['{"model_type": "lla', "[]", "{}", '{"model_type": "unheard_of"}'])
def test_a_config_that_names_no_model_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=f"model.path={folder}"):
        load(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    names = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelError, match=r"incomplete, without \['model-00002-of-00002.safetensors'\]"):
        load(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\*.safetensors; copy or download it again"):
        load(folder)


@pytest.mark.parametrize("left", [0, 5, 100, 0.5, -4])
def test_truncated_weights_are_refused(folder: Path, left: float) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: int(len(content) * left) if left == 0.5 else int(left)])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folder)


def test_weights_that_do_not_fit_the_config_are_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"Missing 9 parameters: model.layers.2"):
        load(folder)
    change_config(folder, num_hidden_layers=2, intermediate_size=128)
    with pytest.raises(ModelError, match="Expected shape"):
        load(folder)


@pytest.mark.parametrize(("text", "reason"), [(None, r"there is no tokenizer\.json; copy or download"), ("{", "")])
def test_a_missing_or_broken_tokenizer_is_refused(folder: Path, text: str | None, reason: str) -> None:
    (folder / "tokenizer.json").unlink()
    if text is not None:
        (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=rf"tokenizer cannot be loaded: {reason}.*[.)\d]$"):
        load(folder)


OWN_CLASS = """
from pathlib import Path
from mlx_lm.models.llama import Model, ModelArgs

Path(__file__).with_name("ran").touch()
"""


def test_code_of_a_model_runs_only_where_that_is_asked_for(folder: Path) -> None:
    expected = logits(load(folder))
    (folder / "own.py").write_text(OWN_CLASS)
    change_config(folder, model_file="own.py")
    with pytest.raises(ModelError, match=r"\(own\.py\), which is not run; .* model\.trust_remote_code=true"):
        load(folder)
    assert not (folder / "ran").exists()
    assert mx.array_equal(logits(load(folder, trust_remote_code=True)), expected)
    assert (folder / "ran").exists()
    (folder / "own.py").write_text("import nothing_such")
    with pytest.raises(ModelError, match=r"own\.py fails: No module named 'nothing_such'"):
        load(folder, trust_remote_code=True)


OWN_TOKENIZER = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    Path(__file__).with_name("ran").touch()
"""


def test_code_of_a_tokenizer_runs_only_where_that_is_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "own.py").write_text(OWN_TOKENIZER)
    file = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    with pytest.raises(ModelError, match=r"the tokenizer brings code of its own .* model\.trust_remote_code=true"):
        load(folder)
    assert load(folder, trust_remote_code=True).tokenizer.encode("2 + 3") == load("nano").tokenizer.encode("2 + 3")
    assert list(tmp_path.glob("modules/**/ran"))


def test_a_config_that_transformers_refuses_is_an_error_of_the_model(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(tiny_model("gemma2"), tmp_path / "model"))
    change_config(broken, query_pre_attn_scalar=16.5)
    with pytest.raises(ModelError, match="query_pre_attn_scalar"):
        load(broken)


def test_a_model_class_that_never_calls_its_base_is_frozen_too(tiny_model: Callable[[str], Path]) -> None:
    assert not tree_flatten(load(tiny_model("recurrent_gemma")).base.trainable_parameters())


def test_a_model_that_cannot_compute_a_token_is_an_error_of_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object, *_: object, **__: object) -> mx.array:
        raise RuntimeError("[Primitive::eval] Not implemented here.")

    monkeypatch.setattr("mlx_lm.models.llama.Model.__call__", broken)
    with pytest.raises(ModelError, match=r"model\.path=.*: llama cannot compute a first token here: .*Not implemented"):
        load(folder)


def test_unknown_targets_are_refused_with_the_choices(folder: Path) -> None:
    with pytest.raises(AdapterError, match=r"has no layer \['zz_proj'\]; choices: all-linear or of \['down_proj'"):
        load(folder, lora=LoraSettings(targets=("q_proj", "zz_proj")))


def test_the_fingerprint_tells_bases_apart(folder: Path, tiny_model: Callable[[str], Path]) -> None:
    whole = load(folder).sha256
    assert whole == load(tiny_model("llama")).sha256
    assert whole != load(folder, dtype="float16").sha256
    assert whole != load(tiny_model("qwen2")).sha256


def test_the_fingerprint_is_the_bases_whatever_is_adapted(folder: Path) -> None:
    assert load(folder, lora=LoraSettings(targets=("q_proj",))).sha256 == load(folder).sha256


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_ctx": 512, "rope_scaling": None}, 512),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        ({"state_size": 8}, UNBOUNDED),
    ],
    ids=["plain", "old name", "linear", "yarn", "llama3", "recurrent"],
)
def test_a_model_knows_the_positions_that_it_was_trained_for_and_stretched_to(
    config: dict[str, object], positions: int
) -> None:
    assert max_positions(config) == positions
