import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from mlx_lm.tuner.utils import load_adapters

from parallm.errors import AdapterError
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.files import read_adapter, write_exactly, write_mlx, write_peft

TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6]]
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FORMS: list[dict[str, Any]] = [
    {"rslora": True},
    {"dora": True},
    {"dora": True, "rslora": True, "rank": 5},
    {"ranks": {"q_proj": 5, "1.mlp.down_proj": 2}},
    {"ranks": {"q_proj": 5, "1.mlp.down_proj": 2}, "alphas": {"v_proj": 7.5}, "rslora": True},
    {"ranks": {"q_proj": 5}, "alphas": {"0.mlp.gate_proj": 3.0}, "dora": True},
]
ALL = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


def tiny_llama() -> nn.Module:
    mx.random.seed(7)
    model: nn.Module = llama.Model(llama.ModelArgs.from_dict(LLAMA))
    model.update(tree_map(lambda weight: mx.random.normal(weight.shape) * 0.2, model.parameters()))
    mx.eval(model.parameters())
    return model


def sites_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name: (linear.weight.shape[1], linear.weight.shape[0]) for name, linear in linears}


def random_adapter(
    targets: dict[str, tuple[int, int]],
    *,
    rank: int = 3,
    alpha: float = 10.0,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    rslora: bool = False,
    dora: bool = False,
) -> Adapter:
    """`ranks` and `alphas` are by the ends of paths."""
    mx.random.seed(11)
    arrays = {}
    target_ranks = {target: value for target in targets for end, value in (ranks or {}).items() if target.endswith(end)}
    site_alphas = {target: value for target in targets for end, value in (alphas or {}).items() if target.endswith(end)}
    for target, (inputs, outputs) in targets.items():
        columns = target_ranks.get(target, rank)
        arrays[f"{target}.lora_a"] = mx.random.normal((inputs, columns)) * 0.3
        arrays[f"{target}.lora_b"] = mx.random.normal((columns, outputs)) * 0.3
        if dora:
            arrays[f"{target}.m"] = mx.random.uniform(0.5, 2.0, (outputs,))
    return make_adapter(
        arrays,
        version=12,
        parent=11,
        step=12,
        rank=rank,
        alpha=alpha,
        ranks=target_ranks,
        alphas=site_alphas,
        rslora=rslora,
        dropout=0.1,
    )


@pytest.fixture
def model() -> nn.Module:
    return tiny_llama()


@pytest.fixture
def adapter(model: nn.Module) -> Adapter:
    return random_adapter({target: shape for target, shape in sites_of(model).items() if target.endswith(ALL)})


def logits_by_hand(adapter: Adapter) -> np.ndarray:
    arrays = {name: np.array(array) for name, array in adapter.arrays.items()}
    parts = {
        target: (arrays[f"{target}.lora_a"].T, arrays[f"{target}.lora_b"].T, scale, arrays.get(f"{target}.m"))
        for target, scale in adapter.scales.items()
    }
    return logits_with(parts)


def logits_with(parts: Mapping[str, tuple[np.ndarray, np.ndarray, float, np.ndarray | None]]) -> np.ndarray:
    """Of the base with W + scale B A in place of W, its rows stretched to the magnitudes if there are any."""
    model = tiny_llama()
    weights = dict(tree_flatten(model.parameters()))
    for target, (a, b, scale, magnitude) in parts.items():
        weight = np.array(weights[f"{target}.weight"]) + scale * b @ a
        if magnitude is not None:
            weight *= (magnitude / np.linalg.norm(weight, axis=1))[:, None]
        weights[f"{target}.weight"] = mx.array(weight)
    model.load_weights(list(weights.items()))
    return np.array(model(mx.array(TOKENS)))


def logits_of_peft(folder: Path) -> np.ndarray:
    """What PEFT makes of a folder: its rules for names, ranks and scales (tuners/lora) in numpy."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = mx.load(str(folder / "adapter_model.safetensors"))
    assert isinstance(tensors, dict)
    parts = {}
    for target in sites_of(tiny_llama()):
        layer = re.sub(rf".*\.{config['layers_pattern']}\.(\d+)\..*", r"\1", target)
        chosen = target in config["target_modules"] or any(
            target.endswith(f".{end}") for end in config["target_modules"]
        )
        if not chosen or (config["layers_to_transform"] and int(layer) not in config["layers_to_transform"]):
            continue
        rank, alpha = config["r"], config["lora_alpha"]
        for key, value in config["rank_pattern"].items():
            rank = value if re.match(rf"(.*\.)?({key})$", target) else rank
        for key, value in config["alpha_pattern"].items():
            alpha = value if re.match(rf"(.*\.)?({key})$", target) else alpha
        a, b = (np.array(tensors.pop(f"base_model.model.{target}.lora_{part}.weight")) for part in "AB")
        assert a.shape[0] == b.shape[1] == rank
        magnitude = (
            np.array(tensors.pop(f"base_model.model.{target}.lora_magnitude_vector")) if config["use_dora"] else None
        )
        parts[target] = a, b, alpha / rank**0.5 if config["use_rslora"] else alpha / rank, magnitude
    assert not tensors
    return logits_with(parts)


def logits_of_mlx_lm(folder: Path) -> np.ndarray:
    model = load_adapters(tiny_llama(), str(folder))
    model.eval()
    return np.array(model(mx.array(TOKENS)))


def test_the_random_adapter_changes_the_logits(model: nn.Module, adapter: Adapter) -> None:
    assert np.abs(logits_by_hand(adapter) - np.array(model(mx.array(TOKENS)))).max() > 0.1


def test_mlx_lm_computes_the_same_logits_from_the_written_adapter(adapter: Adapter, tmp_path: Path) -> None:
    write_mlx(adapter, tmp_path, num_layers=2)
    np.testing.assert_allclose(logits_of_mlx_lm(tmp_path), logits_by_hand(adapter), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_mlx_lm_and_peft_compute_the_same_logits_from_every_form(
    form: dict[str, Any], model: nn.Module, tmp_path: Path
) -> None:
    adapter = random_adapter(
        {target: shape for target, shape in sites_of(model).items() if target.endswith(ALL)}, **form
    )
    write_mlx(adapter, tmp_path / "mlx", num_layers=2)
    write_peft(adapter, tmp_path / "peft", "base", model_type="llama")
    expected = logits_by_hand(adapter)
    assert np.abs(expected - np.array(model(mx.array(TOKENS)))).max() > 0.1
    np.testing.assert_allclose(logits_of_mlx_lm(tmp_path / "mlx"), expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(logits_of_peft(tmp_path / "peft"), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_comes_back_equal_from_peft_and_from_the_exact_format(
    form: dict[str, Any], adapter: Adapter, model: nn.Module, tmp_path: Path
) -> None:
    written = random_adapter({target: sites_of(model)[target] for target in adapter.targets}, **form)
    write_peft(written, tmp_path / "peft", "base", model_type="llama")
    write_exactly(written, tmp_path / "exact", num_layers=2, base_name="base")
    for folder in ("peft", "exact"):
        read = read_adapter(tmp_path / folder, sites_of(model))
        assert (read.digest, read.scales, read.is_dora) == (written.digest, written.scales, written.is_dora)
        assert (read.alpha, read.rslora, read.ranks) == (written.alpha, written.rslora, written.ranks)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_has_the_same_products_when_read_from_mlx_lm_s_format(
    form: dict[str, Any], adapter: Adapter, model: nn.Module, tmp_path: Path
) -> None:
    written = random_adapter({target: sites_of(model)[target] for target in adapter.targets}, **form)
    write_mlx(written, tmp_path, num_layers=2)
    read = read_adapter(tmp_path, sites_of(model))
    np.testing.assert_allclose(logits_by_hand(read), logits_by_hand(written), rtol=0, atol=2e-5)


def test_the_last_layers_are_named_by_their_number(model: nn.Module, tmp_path: Path) -> None:
    chosen = {
        target: shape for target, shape in sites_of(model).items() if target.startswith("model.layers.1.self_attn")
    }
    last = random_adapter(chosen)
    write_mlx(last, tmp_path, num_layers=2)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["num_layers"], config["lora_parameters"]["keys"][0]) == (1, "self_attn.k_proj")
    np.testing.assert_allclose(logits_of_mlx_lm(tmp_path), logits_by_hand(last), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "names", "layers"),
    [("1", ["self_attn.q_proj", "self_attn.v_proj"], [1]), ("", ["self_attn.q_proj", "self_attn.v_proj"], [0, 1])],
)
def test_the_peft_config_names_endings_and_layers(
    model: nn.Module, layer: str, names: list[str], layers: list[int], tmp_path: Path
) -> None:
    ends = (f"{layer}.self_attn.q_proj", f"{layer}.self_attn.v_proj")
    written = random_adapter({target: shape for target, shape in sites_of(model).items() if target.endswith(ends)})
    write_peft(written, tmp_path, "base", model_type="llama")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["target_modules"], config["layers_to_transform"]) == (names, layers)
    np.testing.assert_allclose(logits_of_peft(tmp_path), logits_by_hand(written), rtol=0, atol=1e-5)


def test_layers_with_different_targets_are_named_one_by_one_for_peft(model: nn.Module, tmp_path: Path) -> None:
    ends = ("0.self_attn.q_proj", "1.self_attn.v_proj", "lm_head")
    written = random_adapter({target: shape for target, shape in sites_of(model).items() if target.endswith(ends)})
    write_peft(written, tmp_path, "base", model_type="llama")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == list(written.targets)
    np.testing.assert_allclose(logits_of_peft(tmp_path), logits_by_hand(written), rtol=0, atol=1e-5)


def test_patterns_are_short_where_all_layers_agree(model: nn.Module, tmp_path: Path) -> None:
    targets = {target: shape for target, shape in sites_of(model).items() if target.endswith(ALL)}
    write_peft(
        random_adapter(targets, ranks={"q_proj": 5, "1.mlp.down_proj": 2}, alphas={"v_proj": 7.5}),
        tmp_path,
        "b",
        model_type="llama",
    )
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"q_proj": 5, "model.layers.1.mlp.down_proj": 2}
    assert config["alpha_pattern"] == {"v_proj": 7.5}


@pytest.mark.parametrize("ending", ["0.self_attn.q_proj", "1.mlp.up_proj", "v_proj", "lm_head"])
def test_mlx_lm_reads_adapters_of_some_layers_only(model: nn.Module, ending: str, tmp_path: Path) -> None:
    chosen = {
        target: shape for target, shape in sites_of(model).items() if target.endswith((ending, "1.self_attn.o_proj"))
    }
    partial = random_adapter(chosen)
    write_mlx(partial, tmp_path, num_layers=2)
    np.testing.assert_allclose(logits_of_mlx_lm(tmp_path), logits_by_hand(partial), rtol=0, atol=1e-5)


def test_the_mlx_config_names_targets_within_a_layer_where_layers_are_alike(adapter: Adapter, tmp_path: Path) -> None:
    write_mlx(adapter, tmp_path, num_layers=2)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["lora_parameters"]["keys"] == sorted(ALL)


def test_the_mlx_config_names_full_paths_where_the_base_has_more_layers(adapter: Adapter, tmp_path: Path) -> None:
    write_mlx(adapter, tmp_path, num_layers=3)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["lora_parameters"]["keys"] == list(adapter.targets)


@pytest.mark.parametrize("write_format", ["mlx", "peft"])
def test_an_adapter_comes_back_equal(adapter: Adapter, model: nn.Module, write_format: str, tmp_path: Path) -> None:
    write(adapter, tmp_path, write_format)
    read = read_adapter(tmp_path, sites_of(model))
    assert (read.name, read.version, read.parent, read.step) == ("policy", 12, 11, 12)
    assert (read.rank, read.alpha, read.dropout, read.targets) == (3, 10.0, 0.1, adapter.targets)
    assert read.digest == adapter.digest


def test_name_and_version_can_be_chosen_when_reading(adapter: Adapter, tmp_path: Path) -> None:
    write_mlx(adapter, tmp_path, num_layers=2)
    read = read_adapter(tmp_path, name="start", version=3)
    assert (read.name, read.version) == ("start", 3)


def test_an_adapter_trained_by_mlx_lm_is_read(tmp_path: Path) -> None:
    arrays = {
        "model.layers.0.mlp.up_proj.lora_a": mx.ones((32, 4)),
        "model.layers.0.mlp.up_proj.lora_b": mx.ones((4, 48)),
    }
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), arrays)
    config = {"num_layers": 1, "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}, "fine_tune_type": "lora"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    read = read_adapter(tmp_path)
    assert (read.name, read.version, read.parent, read.rank, read.alpha) == ("policy", 0, None, 4, 80.0)


def test_expressions_in_patterns_of_peft_are_understood(adapter: Adapter, tmp_path: Path) -> None:
    write_peft(adapter, tmp_path, "base", model_type="llama")
    change_config(tmp_path, alpha_pattern={r"layers\.0\..*proj": 6, "q_proj": 99}, use_rslora=True)
    scales = read_adapter(tmp_path).scales
    assert scales["model.layers.0.self_attn.q_proj"] == pytest.approx(6 / 3**0.5)
    assert scales["model.layers.1.self_attn.q_proj"] == pytest.approx(99 / 3**0.5)
    assert scales["model.layers.1.mlp.down_proj"] == pytest.approx(10 / 3**0.5)


def test_a_pattern_that_is_no_expression_is_refused(adapter: Adapter, tmp_path: Path) -> None:
    write_peft(adapter, tmp_path, "base", model_type="llama")
    change_config(tmp_path, rank_pattern={"(": 6})
    with pytest.raises(AdapterError, match="cannot be read"):
        read_adapter(tmp_path)


def test_magnitudes_of_older_and_newer_versions_of_peft_are_read(model: nn.Module, tmp_path: Path) -> None:
    written = random_adapter({"model.layers.0.mlp.up_proj": (32, 48)}, dora=True)
    write_peft(written, tmp_path, "base", model_type="llama")
    path = tmp_path / "adapter_model.safetensors"
    for ending in (".weight", ".default.weight"):
        tensors = {re.sub("vector.*", f"vector{ending}", name): array for name, array in mx.load(str(path)).items()}
        mx.save_safetensors(str(path), tensors)
        assert read_adapter(tmp_path).digest == written.digest


@pytest.mark.parametrize(("key", "value"), [("use_dora", True), ("fine_tune_type", "dora")])
def test_dora_without_magnitudes_is_refused(adapter: Adapter, key: str, value: object, tmp_path: Path) -> None:
    write(adapter, tmp_path, "peft" if key == "use_dora" else "mlx")
    change_config(tmp_path, **{key: value})
    with pytest.raises(AdapterError, match="says that it is DoRA, and its weights hold no magnitudes"):
        read_adapter(tmp_path)


def test_magnitudes_in_a_file_that_is_lora_by_its_config_are_refused(model: nn.Module, tmp_path: Path) -> None:
    write_mlx(random_adapter({"model.layers.0.mlp.up_proj": (32, 48)}, dora=True), tmp_path, num_layers=2)
    change_config(tmp_path, fine_tune_type="lora")
    with pytest.raises(AdapterError, match="says that it is LoRA, and its weights hold magnitudes of DoRA"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("write_format", ["mlx", "peft"])
def test_another_base_is_refused_with_target_shape_and_way_out(
    adapter: Adapter, write_format: str, tmp_path: Path
) -> None:
    write(adapter, tmp_path, write_format)
    other = dict.fromkeys(adapter.targets, (40, 40))
    expected = r"model\.layers\.0\.mlp\.down_proj\.lora_a has shape \(48, 3\), expected \(40, 3\); set model\.path"
    with pytest.raises(AdapterError, match=expected):
        read_adapter(tmp_path, other)


def test_a_target_that_the_base_lacks_is_refused_by_name(adapter: Adapter, tmp_path: Path) -> None:
    write_mlx(adapter, tmp_path, num_layers=2)
    with pytest.raises(
        AdapterError, match=r"down_proj is no LoRA target here; there are 1, such as model\.x; load the base"
    ):
        read_adapter(tmp_path, {"model.x": (32, 32)})


def test_changed_weights_do_not_pass_as_the_saved_ones(adapter: Adapter, tmp_path: Path) -> None:
    write_mlx(adapter, tmp_path, num_layers=2)
    flip_last_byte(tmp_path / "adapters.safetensors")
    with pytest.raises(AdapterError, match="damaged"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 100, 1000])
def test_a_truncated_adapter_is_refused(adapter: Adapter, size: int, tmp_path: Path) -> None:
    write_mlx(adapter, tmp_path, num_layers=2)
    weights = tmp_path / "adapters.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(AdapterError, match="no whole safetensors file"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"peft_type": "LORA"}', '{"lora_parameters": {"rank": "x"}}'])
def test_a_broken_config_is_refused(adapter: Adapter, text: str, tmp_path: Path) -> None:
    write_peft(adapter, tmp_path, "base", model_type="llama")
    write_mlx(adapter, tmp_path, num_layers=2)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterError, match="cannot be read"):
        read_adapter(tmp_path)


def test_a_folder_without_an_adapter_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapters\.safetensors \(mlx-lm\) or adapter_model\.safetensors \(PEFT"):
        read_adapter(tmp_path / "nothing")


@pytest.mark.parametrize("key", ["lora_bias", "target_parameters", "modules_to_save"])
def test_what_peft_can_do_beyond_linear_layers_is_refused_by_name(adapter: Adapter, key: str, tmp_path: Path) -> None:
    write_peft(adapter, tmp_path, "base", model_type="llama")
    change_config(tmp_path, **{key: {"q_proj": 8}})
    with pytest.raises(AdapterError, match=key):
        read_adapter(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of PEFT, transformers and PyTorch
def test_peft_computes_the_same_logits_and_its_own_files_are_read(adapter: Adapter, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", exc_type=ImportError)
    peft = pytest.importorskip("peft", exc_type=ImportError)
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    save_base(tmp_path / "base")
    write_peft(adapter, tmp_path / "peft", str(tmp_path / "base"), model_type="llama")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "peft")).eval()
    with torch.no_grad():
        logits = loaded(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits, logits_by_hand(adapter), rtol=0, atol=1e-4)
    loaded.save_pretrained(str(tmp_path / "saved_by_peft"))
    assert read_adapter(tmp_path / "saved_by_peft").digest == adapter.digest


def save_base(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    weights = dict(tree_flatten(tiny_llama().parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})


def write(adapter: Adapter, folder: Path, write_format: str) -> None:
    if write_format == "mlx":
        write_mlx(adapter, folder, num_layers=2)
    else:
        write_peft(adapter, folder, "base", model_type="llama")


def change_config(folder: Path, **values: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
