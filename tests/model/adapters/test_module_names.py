"""Layers have the names of transformers' classes in PEFT's files; the names are transformers' own, stored once."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from parallm.errors import AdapterError
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.files import read_adapter, read_arrays, write_arrays, write_exactly, write_mlx, write_peft
from parallm.model.adapters.initial import initial_arrays
from parallm.model.adapters.module_names import KNOWN, modules_of
from parallm.model.shared_model import SharedModel

LAYERS = json.loads((Path(__file__).parent / "peft_layers.json").read_text())
"""Model types with transformers' class, targets of a first layer of each kind, and the class's modules with the
same weights, compared number by number on random models of transformers 5.23. Modules are left out where they are
called as the targets are."""


def types() -> Iterator[tuple[str, list[str], list[str]]]:
    for group in LAYERS:
        for model_type in group["classes"]:
            yield model_type, group["targets"], group.get("modules", group["targets"])


def adapter_of(model: SharedModel, rank: int = 2) -> Adapter:
    arrays = initial_arrays(model.targets, rank, mx.random.key(1))
    arrays = {name: array + 0.25 for name, array in arrays.items()}
    return make_adapter(arrays, version=1, rank=rank, alpha=4)


def test_every_known_type_was_compared_with_transformers() -> None:
    assert {model_type for model_type, *_ in types()} == set(KNOWN)


@pytest.mark.parametrize(("model_type", "targets", "modules"), [*types()], ids=lambda value: str(value)[:30])
def test_names_are_those_of_transformers_and_back(model_type: str, targets: list[str], modules: list[str]) -> None:
    assert list(modules_of(targets, model_type).values()) == modules
    names = KNOWN[model_type]
    assert [names.from_peft(module) for module in modules] == targets
    assert [names.from_peft(target) for target in targets] == targets


@pytest.mark.parametrize(
    "architecture", ["llama", "gpt2", "gpt_neox", "qwen3_5", "qwen3_5_moe", "nemotron_h", "lfm2_moe", "gemma3_text"]
)
def test_a_file_for_peft_names_the_layers_of_transformers_and_is_read_back(
    architecture: str, load_tiny: Callable[..., SharedModel], tmp_path: Path
) -> None:
    model = load_tiny(architecture)
    adapter = adapter_of(model)
    write_peft(adapter, tmp_path, "base", model_type=architecture)
    known = next(set(modules) for model_type, _, modules in types() if model_type == architecture)
    tensors, _ = read_arrays(tmp_path / "adapter_model.safetensors")
    assert {first_layer(name) for name in tensors} <= {
        f"base_model.model.{module}.lora_{part}.weight" for module in known for part in "AB"
    }
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert all(
        any(module.endswith(target) for module in known) for target in map(first_layer, config["target_modules"])
    )
    assert read_adapter(tmp_path, model.targets, model_type=architecture).digest == adapter.digest


def first_layer(name: str) -> str:
    return ".".join("0" if part.isdecimal() else part for part in name.split("."))


@pytest.mark.parametrize("head", ["model", "model.language_model", "language_model.model"])
def test_adapters_of_both_classes_and_our_own_names_are_read(
    head: str, load_tiny: Callable[..., SharedModel], tmp_path: Path
) -> None:
    """A wrapper has its layers elsewhere than the class of its text model alone."""
    model = load_tiny("qwen3_5")
    adapter = adapter_of(model)
    write_peft(adapter, tmp_path, "base", model_type="qwen3_5")
    weights = tmp_path / "adapter_model.safetensors"
    tensors, _ = read_arrays(weights)
    start = "base_model.model."
    renamed = {name.replace(f"{start}model.", f"{start}{head}."): array for name, array in tensors.items()}
    write_arrays(weights, renamed, {})
    read = read_adapter(tmp_path, model.targets, model_type="qwen3_5")
    assert (read.digest, read.targets) == (adapter.digest, adapter.targets)


def test_patterns_are_by_the_names_of_transformers(load_tiny: Callable[..., SharedModel], tmp_path: Path) -> None:
    model = load_tiny("gpt2")
    target = "model.h.0.attn.c_attn"
    arrays = initial_arrays(model.targets, 2, mx.random.key(1), ranks={target: 3})
    adapter = make_adapter(arrays, version=1, rank=2, alpha=4, ranks={target: 3}, alphas={target: 7.5})
    write_peft(adapter, tmp_path, "base", model_type="gpt2")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"transformer.h.0.attn.c_attn": 3}
    read = read_adapter(tmp_path, model.targets, model_type="gpt2")
    assert (read.digest, read.ranks, read.alphas) == (adapter.digest, {target: 3}, {target: 7.5})


def test_a_type_whose_names_are_unknown_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        AdapterError, match=r"of rwkv7 is not written.*not known here; export it with formats=\[mlx,fus"
    ):
        modules_of(["model.layers.0.attn.r_proj"], "rwkv7")
    with pytest.raises(AdapterError, match=r"of falcon_h1 is not written.*folds this model's multipliers"):
        modules_of(["model.layers.0.self_attn.q_proj"], "falcon_h1")


@pytest.mark.parametrize(
    ("model_type", "target"),
    [("mixtral", "model.layers.0.block_sparse_moe.gate"), ("granitemoehybrid", "model.layers.0.mlp.gate_proj")],
)
def test_a_layer_that_transformers_lacks_is_refused(model_type: str, target: str) -> None:
    with pytest.raises(AdapterError, match=f"no linear layer for {target}.*leave that layer out of model.lora.targets"):
        modules_of([target], model_type)


@pytest.mark.parametrize(
    ("architecture", "left_out"), [("deepseek_v3", "mlp.down_proj"), ("nemotron_h", "mixer.out_proj"), ("llama", None)]
)
def test_layers_that_peft_itself_leaves_out_are_said(
    architecture: str,
    left_out: str | None,
    load_tiny: Callable[..., SharedModel],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_peft(adapter_of(load_tiny(architecture)), tmp_path, "base", model_type=architecture)
    said = [record.message for record in caplog.records if "PEFT 0.21 itself does not load" in record.message]
    assert len(said) == (left_out is not None)
    assert left_out is None or left_out in said[0]


def test_layers_beside_those_of_an_image_model_are_named_one_by_one(tmp_path: Path) -> None:
    targets = [f"language_model.model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    arrays = {f"{target}.lora_a": mx.ones((8, 2)) for target in targets} | {
        f"{target}.lora_b": mx.ones((2, 8)) for target in targets
    }
    write_peft(make_adapter(arrays, version=1, rank=2, alpha=4), tmp_path, "base", model_type="gemma3")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == [f"model.language_model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    assert config["layers_to_transform"] is None


def test_rescaled_adapters_of_others_are_refused_and_our_own_read(
    load_tiny: Callable[..., SharedModel], tmp_path: Path
) -> None:
    model = load_tiny("falcon_h1")
    arrays = initial_arrays(model.targets, 2, mx.random.key(1))
    ours = make_adapter(arrays, version=1, rank=2, alpha=4, alphas={min(model.targets): 7.5})
    write_exactly(ours, tmp_path, num_layers=2, base_name="base")
    assert read_adapter(tmp_path, model.targets, model_type="falcon_h1").digest == ours.digest
    weights = tmp_path / "adapter_model.safetensors"
    write_arrays(weights, read_arrays(weights)[0], {})
    with pytest.raises(AdapterError, match="PEFT's adapters of falcon_h1 have other numbers"):
        read_adapter(tmp_path, model.targets, model_type="falcon_h1")


def test_an_adapter_of_mlx_lm_for_layers_that_are_no_targets_is_refused_with_the_way_out(
    load_tiny: Callable[..., SharedModel], tmp_path: Path
) -> None:
    model = load_tiny("qwen3_moe")
    write_mlx(adapter_of(model), tmp_path, num_layers=2)
    weights = tmp_path / "adapters.safetensors"
    arrays, _ = read_arrays(weights)
    target = "model.layers.0.mlp.switch_mlp.gate_proj"
    experts = {f"{target}.lora_a": mx.zeros((4, 2, 64)), f"{target}.lora_b": mx.zeros((4, 32, 2))}
    write_arrays(weights, arrays | experts, {})
    with pytest.raises(AdapterError, match=rf"{target} is no LoRA target here; .* experts to model.lora.targets"):
        read_adapter(tmp_path, model.targets)
    router = {"model.layers.0.mlp.gate.lora_a": mx.zeros((64, 2)), "model.layers.0.mlp.gate.lora_b": mx.zeros((2, 4))}
    write_arrays(weights, arrays | router, {})
    with pytest.raises(
        AdapterError, match=r"it is a router, which all-linear leaves out: name it in model\.lora\.targets"
    ):
        read_adapter(tmp_path, model.targets)
