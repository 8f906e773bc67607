"""A plain model with merged weights does what the base with the adapter does."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from parallm.errors import AdapterError, ModelError
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.fuse import Quantization, fuse, merged_weight, with_dtype, write_model
from parallm.model.load import load_base, load_shared_model
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.single import single_lora
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel

Variant = Callable[..., Adapter]
TOKENS = mx.array([[5, 9, 17, 33, 65]])


def adapted(model: SharedModel, adapter: Adapter) -> mx.array:
    """Logits of the base with the adapter."""
    lora = single_lora(adapter.arrays, lora_scaling(adapter, model))
    return model.head(model.hidden(TOKENS, model.make_cache(), lora)[0])


def fused(folder: Path, adapter: Adapter, dtype: mx.Dtype | None = None) -> tuple[nn.Module, dict[str, Any]]:
    base, config = load_base(folder, str(folder))
    return base, fuse(base, config, adapter, dtype, None)


def test_a_merged_weight_is_the_weight_and_the_scaled_product() -> None:
    arrays = {"target.lora_a": mx.array([[1.0], [2.0]]), "target.lora_b": mx.array([[3.0, 0.0, -1.0]])}
    adapter = make_adapter(arrays, version=1, rank=1, alpha=2.0)
    merged = merged_weight(mx.ones((3, 2)), adapter, "target")
    assert merged.tolist() == [[7.0, 13.0], [1.0, 1.0], [-1.0, -3.0]]


def test_a_merged_weight_of_dora_has_the_magnitudes_as_lengths() -> None:
    arrays = {
        "target.lora_a": mx.array([[1.0], [0.0]]),
        "target.lora_b": mx.array([[2.0, 3.0]]),
        "target.m": mx.array([10.0, 2.0]),
    }
    adapter = make_adapter(arrays, version=1, rank=1, alpha=1.0)
    merged = merged_weight(mx.array([[1.0, 4.0], [-3.0, 5.0]]), adapter, "target")
    assert merged.tolist() == [[6.0, 8.0], [0.0, 2.0]]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma", "phi3", "mixtral", "gpt2"])
@pytest.mark.parametrize("form", [{}, {"rslora": True, "ranks": {"q_proj": 2}}, {"dora": True}])
def test_the_fused_model_has_the_logits_of_base_and_adapter(
    architecture: str,
    form: Mapping[str, Any],
    load_tiny: Callable[..., SharedModel],
    tiny_model: Callable[[str], Path],
    variant: Variant,
) -> None:
    model = load_tiny(architecture)
    if "ranks" in form and not any(target.endswith("q_proj") for target in model.targets):
        form = {"rslora": True}
    adapter = variant(model, **form)
    whole, _ = fused(tiny_model(architecture), adapter)
    expected = adapted(model, adapter)
    assert mx.abs(whole(TOKENS)[0] - expected).max().item() < 2e-3 * mx.abs(expected).max().item()
    assert mx.abs(model.base(TOKENS)[0] - expected).max().item() > 0.1


@pytest.fixture
def quantized(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """The small llama with 4 bits a weight."""
    base, config = load_model(tiny_model("llama"))
    base, config = quantize_model(base, config, 32, 4)
    save_model(tmp_path / "quantized", base)
    save_config(config, tmp_path / "quantized" / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "quantized" / name).write_bytes((tiny_model("llama") / name).read_bytes())
    return tmp_path / "quantized"


def test_a_quantized_base_is_dequantized(quantized: Path, variant: Variant) -> None:
    model = load_shared_model(ModelSettings(path=str(quantized), lora=LoraSettings(rank=4)))
    adapter = variant(model)
    whole, config = fused(quantized, adapter)
    expected = adapted(model, adapter)
    assert mx.abs(whole(TOKENS)[0] - expected).max().item() < 2e-3 * mx.abs(expected).max().item()
    assert "quantization" not in config
    assert "quantization_config" not in config


def test_a_fused_model_can_be_quantized_anew(quantized: Path, variant: Variant) -> None:
    model = load_shared_model(ModelSettings(path=str(quantized), lora=LoraSettings(rank=4)))
    base, config = load_base(quantized, str(quantized))
    described = fuse(base, config, variant(model), None, Quantization(bits=8, group_size=32))
    assert described["quantization"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    assert base.layers[0].mlp.up_proj.bits == 8


def test_a_group_size_that_fits_no_layer_is_refused(tiny_model: Callable[[str], Path], variant: Variant) -> None:
    folder = tiny_model("llama")
    model = load_shared_model(ModelSettings(path=str(folder), lora=LoraSettings(rank=4)))
    base, config = load_base(folder, str(folder))
    with pytest.raises(ModelError, match=r"no layer of the model can be quantized with quantize\.group_size=128"):
        fuse(base, config, variant(model), None, Quantization(bits=4, group_size=128))


def test_a_fused_model_keeps_its_type_or_gets_another(
    load_tiny: Callable[..., SharedModel], tiny_model: Callable[[str], Path], variant: Variant
) -> None:
    adapter = variant(load_tiny("llama"))
    kept, kept_config = fused(tiny_model("llama"), adapter)
    other, other_config = fused(tiny_model("llama"), adapter, mx.bfloat16)
    assert (kept.layers[0].mlp.up_proj.weight.dtype, kept_config["dtype"]) == (mx.float32, "float32")
    assert (other.layers[0].mlp.up_proj.weight.dtype, other_config["dtype"]) == (mx.bfloat16, "bfloat16")
    assert other.model.norm.weight.dtype == mx.bfloat16


def test_the_type_is_written_where_the_config_says_it() -> None:
    config = {"torch_dtype": "float16", "text_config": {"dtype": "float16", "size": 3}}
    assert with_dtype(config, "bfloat16") == {
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "size": 3},
    }


def test_an_adapter_of_another_base_is_refused(
    load_tiny: Callable[..., SharedModel], tiny_model: Callable[[str], Path], variant: Variant
) -> None:
    with pytest.raises(AdapterError, match=r"the base has no layer .*, which the adapter changes"):
        fused(tiny_model("gpt2"), variant(load_tiny("llama")))
    nano = load_shared_model(ModelSettings())
    with pytest.raises(AdapterError, match=r"has weights of shape \(.*\), the adapter is for"):
        fused(tiny_model("llama"), variant(nano))


def test_large_models_are_written_in_shards(
    tiny_model: Callable[[str], Path],
    load_tiny: Callable[..., SharedModel],
    variant: Variant,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "parallm.model.adapters.fuse.make_shards", lambda arrays: [dict([pair]) for pair in arrays.items()]
    )
    whole, config = fused(tiny_model("llama"), variant(load_tiny("llama")))
    expected = whole(TOKENS)
    mx.eval(expected)
    write_model(whole, config, tiny_model("llama"), tmp_path / "fused")
    index = json.loads((tmp_path / "fused" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list((tmp_path / "fused").glob("*.safetensors"))) > 10
    again, _ = load_model(tmp_path / "fused")
    assert mx.array_equal(again(TOKENS), expected)
