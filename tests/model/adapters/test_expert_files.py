"""Adapters of experts in PEFT's format: what PEFT computes with its own and with ours, and what is read and written."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.errors import AdapterError
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.expert_files import to_parameters
from parallm.model.adapters.files import read_adapter, read_arrays, write_arrays, write_exactly, write_peft
from parallm.model.load import load_shared_model
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.single import single_lora
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel
from tests.model.adapters.expert_cases import REFERENCES, TOKENS, drawn, read_cases, write_adapter, write_base

CASES = read_cases() if REFERENCES.exists() else {}
MAX_ERROR = 1e-4
RANK = 4


def load(folder: Path) -> SharedModel:
    lora = LoraSettings(targets=("all-linear", "experts"))
    return load_shared_model(ModelSettings(path=str(folder), dtype="float32", lora=lora))


def ours(model: SharedModel) -> Adapter:
    """An adapter of a base's experts and of its outputs of attention, from a seed."""
    targets = {
        target: shape
        for target, shape in model.targets.items()
        if len(shape) == 3 or target.endswith(("o_proj", "out_proj"))
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for target, (*stack, inputs, outputs) in targets.items():
        shapes[f"{target}.lora_a"] = (*stack, inputs, RANK)
        shapes[f"{target}.lora_b"] = (*stack, RANK, outputs)
    arrays = {name: mx.array(3 * array) for name, array in drawn(shapes, 3, 1.0).items()}
    return make_adapter(arrays, version=1, rank=RANK, alpha=6.0)


def export(base: str, folder: str) -> None:
    """Write `ours` for PEFT; called by `scripts/build_expert_references.py`."""
    model = load(Path(base))
    write_peft(ours(model), Path(folder), "base", model_type=model.model_type)


def logprobs(model: SharedModel, adapter: Adapter | None) -> tuple[np.ndarray, np.ndarray]:
    lora: LoraBinding | None = None
    if adapter is not None:
        lora = single_lora(adapter.arrays, lora_scaling(adapter, model))
    logits_TV = np.array(model.head(model.hidden(mx.array([TOKENS]), model.make_cache(), lora)[0]), np.float64)
    largest_T1 = logits_TV.max(axis=-1, keepdims=True)
    rows_TV = logits_TV - largest_T1 - np.log(np.exp(logits_TV - largest_T1).sum(axis=-1, keepdims=True))
    return rows_TV[np.arange(len(TOKENS) - 1), np.array(TOKENS[1:])], rows_TV[-1]


def error_of(found: tuple[np.ndarray, np.ndarray], expected: list[list[float]]) -> float:
    return max(float(np.abs(one - np.array(other)).max()) for one, other in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SharedModel]:
    made: dict[str, SharedModel] = {}

    def get(name: str) -> SharedModel:
        if name not in made:
            made[name] = load(write_base(CASES[name], tmp_path_factory.mktemp(name) / "base", for_mlx=True))
        return made[name]

    return get


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_base_computes_as_that_of_transformers(name: str, models: Callable[[str], SharedModel]) -> None:
    assert error_of(logprobs(models(name), None), CASES[name]["base"]) < MAX_ERROR


@pytest.mark.parametrize("name", sorted(CASES))
def test_adapters_of_peft_are_read(
    name: str,
    models: Callable[[str], SharedModel],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    model = models(name)
    folder = write_adapter(CASES[name]["adapter"], tmp_path)
    adapter = read_adapter(folder, model.targets, model_type=model.model_type)
    found = logprobs(model, adapter)
    record_property("experts.peft_error", error_of(found, CASES[name]["with_theirs"]))
    assert error_of(found, CASES[name]["with_theirs"]) < MAX_ERROR
    assert error_of(found, CASES[name]["base"]) > 0.01


@pytest.mark.parametrize("name", sorted(CASES))
def test_peft_computes_with_ours_as_we_do(
    name: str,
    models: Callable[[str], SharedModel],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    model = models(name)
    adapter = ours(model)
    found = logprobs(model, adapter)
    record_property("experts.peft_error", error_of(found, CASES[name]["with_ours"]))
    assert error_of(found, CASES[name]["with_ours"]) < MAX_ERROR
    assert error_of(found, CASES[name]["base"]) > 0.01
    write_peft(adapter, tmp_path, "base", model_type=model.model_type)
    assert read_adapter(tmp_path, model.targets, model_type=model.model_type).digest == adapter.digest


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("parts", [("up_proj",), ("gate_proj", "down_proj"), ("gate_proj", "up_proj"), ("down_proj",)])
def test_any_part_of_the_experts_comes_back_as_it_was(
    parts: tuple[str, ...],
    rslora: bool,
    load_tiny: Callable[..., SharedModel],
    variant: Callable[..., Adapter],
    tmp_path: Path,
) -> None:
    model = load_tiny("gpt_oss", targets=("all-linear", "experts"))
    whole = variant(model, rslora=rslora)
    names = (*parts, "q_proj")
    arrays = {name: array for name, array in whole.arrays.items() if name.split(".")[-2] in names}
    adapter = make_adapter(arrays, version=1, rank=whole.rank, alpha=whole.alpha, rslora=rslora)
    write_peft(adapter, tmp_path / "peft", "base", model_type="gpt_oss")
    read = read_adapter(tmp_path / "peft", model.targets, model_type="gpt_oss")
    assert (read.digest, read.ranks, read.alphas, read.targets) == (adapter.digest, {}, {}, adapter.targets)
    for name, number in (("mlx", whole.alpha), ("exact", 7.5)):
        other = make_adapter(
            arrays, version=1, rank=whole.rank, alpha=whole.alpha, rslora=rslora, alphas={adapter.targets[0]: number}
        )
        write_exactly(other, tmp_path / name, num_layers=2, base_name="base")
        assert read_adapter(tmp_path / name, model.targets, model_type="gpt_oss").digest == other.digest


def test_a_rank_for_each_half_is_refused(
    load_tiny: Callable[..., SharedModel], variant: Callable[..., Adapter]
) -> None:
    model = load_tiny("qwen3_moe", targets="experts")
    with pytest.raises(
        AdapterError, match=r"gate_proj and .*up_proj have different ranks or alphas.*formats=\[mlx,fused\]"
    ):
        to_parameters(variant(model, ranks={"gate_proj": 2}), "qwen3_moe")


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("rwkv7", "the experts of rwkv7 are not written"),
        ("nemotron_h", "keeps the experts of nemotron_h in another way"),
    ],
)
def test_experts_that_peft_cannot_have_are_refused(
    model_type: str, message: str, load_tiny: Callable[..., SharedModel], variant: Callable[..., Adapter]
) -> None:
    model = load_tiny("nemotron_h", targets="experts")
    with pytest.raises(AdapterError, match=message):
        to_parameters(variant(model), model_type)


def changed(folder: Path, **config: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def test_files_that_do_not_fit_are_refused_by_what_they_are(
    load_tiny: Callable[..., SharedModel], variant: Callable[..., Adapter], tmp_path: Path
) -> None:
    model = load_tiny("qwen3_moe", targets="experts")
    write_peft(variant(model), tmp_path, "base", model_type="qwen3_moe")
    with pytest.raises(AdapterError, match=r"no experts are LoRA targets here.*experts in model\.lora\.targets"):
        read_adapter(tmp_path, load_tiny("qwen3_moe").targets, model_type="qwen3_moe")
    with pytest.raises(AdapterError, match="no experts are LoRA targets here"):
        read_adapter(tmp_path)
    changed(tmp_path, rank_pattern={}, r=3)
    with pytest.raises(AdapterError, match=r"the experts' gate_up_proj has lora_A .* 4 experts and rank 3"):
        read_adapter(tmp_path, model.targets, model_type="qwen3_moe")


@pytest.mark.parametrize(("version", "is_read"), [("0.18.0", True), ("0.21.2", False), (None, False)])
def test_the_axes_of_old_versions_are_known_by_shapes_and_by_the_version_where_those_are_alike(
    version: str | None,
    is_read: bool,
    load_tiny: Callable[..., SharedModel],
    variant: Callable[..., Adapter],
    tmp_path: Path,
) -> None:
    """PEFT 0.18 took outputs for inputs: its A is our B, and its B our A."""
    model = load_tiny("mixtral", targets="experts")  # down: 96 -> 64; gate and up together: 64 -> 192
    adapter = variant(model)
    write_peft(adapter, tmp_path, "base", model_type="mixtral")
    path = tmp_path / "adapter_model.safetensors"
    arrays, metadata = read_arrays(path)
    turned = {}
    for name in arrays:
        other = arrays[name.replace("lora_A", "lora_X").replace("lora_B", "lora_A").replace("lora_X", "lora_B")]
        rank = RANK if ".base_layer" not in name else 2 * RANK
        if "lora_A" in name:  # (E * r, outputs) of B (outputs, r * E)
            turned[name] = other.reshape(-1, rank, 4).transpose(2, 1, 0).reshape(4 * rank, -1)
        else:
            turned[name] = other.reshape(4, rank, -1).transpose(2, 1, 0).reshape(-1, rank * 4)
    write_arrays(path, turned, metadata)
    changed(tmp_path, peft_version=version)
    assert read_adapter(tmp_path, model.targets, model_type="mixtral").digest == adapter.digest
    assert math.isfinite(adapter.alpha)
