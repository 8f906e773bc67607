import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from mlx_lm.tuner.utils import load_adapters

from parallm.errors import AdapterError
from parallm.model.adapter import Adapter, make_adapter
from parallm.model.adapter_files import read_adapter, write_mlx, write_peft

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


def random_adapter(sites: dict[str, tuple[int, int]], *, rank: int = 3, alpha: float = 10.0) -> Adapter:
    mx.random.seed(11)
    arrays = {}
    for site, (inputs, outputs) in sites.items():
        arrays[f"{site}.lora_a"] = mx.random.normal((inputs, rank)) * 0.3
        arrays[f"{site}.lora_b"] = mx.random.normal((rank, outputs)) * 0.3
    return make_adapter(arrays, version=12, parent=11, step=12, rank=rank, alpha=alpha, dropout=0.1)


@pytest.fixture
def model() -> nn.Module:
    return tiny_llama()


@pytest.fixture
def adapter(model: nn.Module) -> Adapter:
    return random_adapter({site: shape for site, shape in sites_of(model).items() if site.endswith(ALL)})


def logits_by_hand(adapter: Adapter) -> np.ndarray:
    model = tiny_llama()
    weights = dict(tree_flatten(model.parameters()))
    for site in adapter.targets:
        product = adapter.arrays[f"{site}.lora_a"] @ adapter.arrays[f"{site}.lora_b"]
        weights[f"{site}.weight"] += adapter.alpha / adapter.rank * product.T
    model.load_weights(list(weights.items()))
    return np.array(model(mx.array(TOKENS)))


def logits_of_mlx_lm(folder: Path) -> np.ndarray:
    model = load_adapters(tiny_llama(), str(folder))
    model.eval()
    return np.array(model(mx.array(TOKENS)))


def test_the_random_adapter_changes_the_logits(model: nn.Module, adapter: Adapter) -> None:
    assert np.abs(logits_by_hand(adapter) - np.array(model(mx.array(TOKENS)))).max() > 0.1


def test_mlx_lm_computes_the_same_logits_from_the_written_adapter(adapter: Adapter, tmp_path: Path) -> None:
    write_mlx(adapter, tmp_path, num_layers=2)
    np.testing.assert_allclose(logits_of_mlx_lm(tmp_path), logits_by_hand(adapter), rtol=0, atol=1e-5)


@pytest.mark.parametrize("ending", ["0.self_attn.q_proj", "1.mlp.up_proj", "v_proj", "lm_head"])
def test_mlx_lm_reads_adapters_of_some_layers_only(model: nn.Module, ending: str, tmp_path: Path) -> None:
    chosen = {site: shape for site, shape in sites_of(model).items() if site.endswith((ending, "1.self_attn.o_proj"))}
    partial = random_adapter(chosen)
    write_mlx(partial, tmp_path, num_layers=2)
    np.testing.assert_allclose(logits_of_mlx_lm(tmp_path), logits_by_hand(partial), rtol=0, atol=1e-5)


def test_the_mlx_config_names_sites_within_a_layer_where_all_layers_are_alike(adapter: Adapter, tmp_path: Path) -> None:
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
    read = read_adapter(tmp_path, sites_of(model), rank=3)
    assert (read.name, read.version, read.parent, read.step) == ("policy", 12, 11, 12)
    assert (read.rank, read.alpha, read.dropout, read.targets) == (3, 10.0, 0.1, adapter.targets)
    assert read.sha256 == adapter.sha256


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


def test_rank_stabilised_scaling_of_peft_becomes_plain_alpha(adapter: Adapter, tmp_path: Path) -> None:
    write_peft(adapter, tmp_path, "base")
    change_config(tmp_path, use_rslora=True, lora_alpha=3)
    assert read_adapter(tmp_path).alpha == pytest.approx(3 * 3**0.5)


@pytest.mark.parametrize("write_format", ["mlx", "peft"])
def test_another_base_is_refused_with_site_shape_and_way_out(
    adapter: Adapter, write_format: str, tmp_path: Path
) -> None:
    write(adapter, tmp_path, write_format)
    other = dict.fromkeys(adapter.targets, (40, 40))
    expected = r"model\.layers\.0\.mlp\.down_proj\.lora_a has shape \(48, 3\), expected \(40, 3\); set model\.path"
    with pytest.raises(AdapterError, match=expected):
        read_adapter(tmp_path, other)


def test_a_site_that_the_base_lacks_is_refused_by_name(adapter: Adapter, tmp_path: Path) -> None:
    write_mlx(adapter, tmp_path, num_layers=2)
    with pytest.raises(
        AdapterError, match=r"down_proj is no LoRA site here; there are 1, such as model\.x; load the base"
    ):
        read_adapter(tmp_path, {"model.x": (32, 32)})


def test_another_rank_is_refused_with_the_setting_to_change(adapter: Adapter, tmp_path: Path) -> None:
    write_mlx(adapter, tmp_path, num_layers=2)
    with pytest.raises(AdapterError, match=r"rank 3, the run 16; set model\.lora\.rank=3"):
        read_adapter(tmp_path, rank=16)


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
    write_peft(adapter, tmp_path, "base")
    write_mlx(adapter, tmp_path, num_layers=2)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterError, match="cannot be read"):
        read_adapter(tmp_path)


def test_a_folder_without_an_adapter_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapters\.safetensors \(mlx-lm\) or adapter_model\.safetensors \(PEFT"):
        read_adapter(tmp_path / "nothing")


@pytest.mark.parametrize("key", ["use_dora", "rank_pattern", "modules_to_save"])
def test_what_peft_can_do_beyond_plain_lora_is_refused_by_name(adapter: Adapter, key: str, tmp_path: Path) -> None:
    write_peft(adapter, tmp_path, "base")
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
    write_peft(adapter, tmp_path / "peft", str(tmp_path / "base"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "peft")).eval()
    with torch.no_grad():
        logits = loaded(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits, logits_by_hand(adapter), rtol=0, atol=1e-4)
    loaded.save_pretrained(str(tmp_path / "saved_by_peft"))
    assert read_adapter(tmp_path / "saved_by_peft").sha256 == adapter.sha256


def save_base(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    weights = dict(tree_flatten(tiny_llama().parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})


def write(adapter: Adapter, folder: Path, write_format: str) -> None:
    if write_format == "mlx":
        write_mlx(adapter, folder, num_layers=2)
    else:
        write_peft(adapter, folder, "base")


def change_config(folder: Path, **values: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
