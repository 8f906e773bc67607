import json
from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.utils import load_model

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.initial import initial_arrays
from parallm.model.load import NANO, load_shared_model
from parallm.model.lora.dora import initial_magnitudes, lora_scaling
from parallm.model.lora.linear import LoraBinding, LoraLinear
from parallm.model.lora.single import single_lora
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel

Variant = Callable[..., Adapter]

BLAS = load_blas(DeviceSettings())
TARGET = "model.layers.0.self_attn.q_proj"
TOKENS = mx.array([[5, 300, 17, 9, 44, 2], [7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]])


def view_of(adapter: Adapter | None, model: SharedModel) -> LoraBinding | None:
    return None if adapter is None else single_lora(adapter.arrays, lora_scaling(adapter, model))


def module_at(model: SharedModel, target: str = TARGET) -> LoraLinear:
    module = dict(model.base.named_modules())[target]
    assert isinstance(module, LoraLinear)
    return module


def in_mlx_lm(linear: nn.Module, adapter: Adapter, arrays: Mapping[str, mx.array]) -> nn.Module:
    layer_class = DoRALinear if adapter.is_dora else LoRALinear
    rank = adapter.arrays[f"{TARGET}.lora_a"].shape[1]
    theirs = layer_class.from_base(linear, r=rank, scale=adapter.scales[TARGET])
    for name in ("lora_a", "lora_b", *(["m"] if adapter.is_dora else [])):
        theirs[name] = arrays[f"{TARGET}.{name}"]
    return theirs


@pytest.fixture
def quantized_nano(tmp_path: Path) -> SharedModel:
    base, config = load_model(NANO)
    nn.quantize(base, group_size=32, bits=4)
    for file in NANO.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    config |= {"quantization": {"group_size": 32, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(base.parameters())))
    return load_shared_model(ModelSettings(path=str(tmp_path), quantized="packed"))


@pytest.mark.parametrize(
    "form", [{"dora": True}, {"rslora": True}, {"dora": True, "rslora": True, "ranks": {"q_proj": 7}}], ids=str
)
@pytest.mark.parametrize("quantized", [False, True])
def test_a_target_of_the_nano_model_computes_what_mlx_lm_computes(
    form: dict[str, object], quantized: bool, variant: Variant, quantized_nano: SharedModel
) -> None:
    model = quantized_nano if quantized else load_shared_model(ModelSettings(path="nano"))
    adapter, module = variant(model, **form), module_at(model)
    assert isinstance(module.linear, nn.QuantizedLinear) == quantized
    x = mx.random.normal((2, 5, model.targets[TARGET][0]), key=mx.random.key(2))
    with model.lora_context.applied(view_of(adapter, model)):
        ours = module(x)
    assert mx.abs(ours - module.linear(x)).max().item() > 0.1
    assert mx.allclose(ours, in_mlx_lm(module.linear, adapter, adapter.arrays)(x), rtol=1e-4, atol=1e-4).item()


def test_the_gradient_of_dora_is_that_of_mlx_lm_with_the_norm_held_constant(
    variant: Variant, load_tiny: Callable[..., SharedModel]
) -> None:
    model = load_tiny("qwen2")
    adapter, module = variant(model, dora=True), module_at(model)
    assert "bias" in module.linear
    scaling = lora_scaling(adapter, model)
    x, y = (mx.random.normal((2, 5, 64), key=mx.random.key(seed)) for seed in (2, 3))
    own = {name: array for name, array in adapter.arrays.items() if name.startswith(TARGET)}

    def ours(arrays: dict[str, mx.array]) -> mx.array:
        with model.lora_context.applied(single_lora(dict(adapter.arrays) | arrays, scaling)):
            return (module(x) * y).sum()

    def theirs(arrays: dict[str, mx.array]) -> mx.array:
        return (in_mlx_lm(module.linear, adapter, arrays)(x) * y).sum()

    found, expected = mx.grad(ours)(own), mx.grad(theirs)(own)
    assert set(found) == {f"{TARGET}.{name}" for name in ("lora_a", "lora_b", "m")}
    for name, gradient in expected.items():
        assert mx.abs(gradient).max().item() > 0.1
        assert np.array(found[name]) == pytest.approx(np.array(gradient), rel=1e-4, abs=1e-4)


@pytest.mark.cpu
def test_a_new_dora_adapter_changes_no_bit(load_tiny: Callable[..., SharedModel]) -> None:
    model = load_tiny("qwen2")
    arrays = initial_arrays(model.targets, 4, mx.random.key(0)) | initial_magnitudes(model)
    adapter = make_adapter(arrays, version=0, rank=4, alpha=8.0)
    assert adapter.is_dora
    assert mx.array_equal(model.hidden(TOKENS, None, view_of(adapter, model)), model.hidden(TOKENS, None, None)).item()
