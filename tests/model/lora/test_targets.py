from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from parallm.errors import AdapterError
from parallm.model.adapters.initial import initial_arrays
from parallm.model.load import load_shared_model
from parallm.model.lora.targets import target_ranks
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel

LAYER_SITES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture
def sites_of(tiny_model: Callable[[str], Path]) -> Callable[..., dict[str, tuple[int, ...]]]:
    """The targets of a llama of two layers with the given settings of its adapters."""

    def load(**lora: object) -> dict[str, tuple[int, ...]]:
        settings = LoraSettings(**lora)  # type: ignore[arg-type]  # by name, from the test
        return dict(load_shared_model(ModelSettings(path=str(tiny_model("llama")), lora=settings)).targets)

    return load


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("llama", LAYER_SITES),
        ("phi3", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("gpt2", {"c_attn", "c_proj", "c_fc"}),
        ("gpt_bigcode", {"c_attn", "c_proj", "c_fc"}),
        ("gpt_neox", {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}),
        ("mixtral", {"q_proj", "k_proj", "v_proj", "o_proj"}),  # neither its router, `gate`, nor its experts
        ("mamba", {"in_proj", "x_proj", "dt_proj", "out_proj"}),
    ],
)
def test_all_linear_means_every_linear_layer_but_the_head(
    architecture: str, names: set[str], load_tiny: Callable[..., SharedModel]
) -> None:
    assert {target.rsplit(".", 1)[-1] for target in load_tiny(architecture).targets} == names


def test_a_router_is_adapted_where_it_is_named(tiny_model: Callable[[str], Path]) -> None:
    settings = ModelSettings(path=str(tiny_model("mixtral")), lora=LoraSettings(targets=("gate",)))
    assert set(load_shared_model(settings).targets.values()) == {(64, 4)}


@pytest.mark.parametrize(
    ("architecture", "targets", "names"),
    [
        ("qwen3_moe", "experts", {"gate_proj", "up_proj", "down_proj"}),
        ("qwen3_moe", ("q_proj", "switch_mlp.down_proj"), {"q_proj", "down_proj"}),
        ("mixtral", ("all-linear", "experts"), LAYER_SITES),
        ("nemotron_h", ("switch_mlp.fc1", "switch_mlp.fc2"), {"fc1", "fc2"}),
    ],
)
def test_experts_are_adapted_where_they_are_named(
    architecture: str, targets: str | tuple[str, ...], names: set[str], tiny_model: Callable[[str], Path]
) -> None:
    settings = ModelSettings(path=str(tiny_model(architecture)), lora=LoraSettings(targets=targets))
    chosen = load_shared_model(settings).targets
    assert {target.rsplit(".", 1)[-1] for target in chosen} == names
    experts = {shape for target, shape in chosen.items() if "switch_mlp" in target}
    assert experts
    assert all(len(shape) == 3 and shape[0] == 4 for shape in experts)


@pytest.mark.parametrize(
    ("architecture", "targets", "says"),
    [
        ("mixtral", None, True),
        ("qwen3_5_moe", "all-linear", True),
        ("mixtral", ("all-linear", "experts"), False),
        ("llama", None, False),
    ],
)
def test_experts_that_are_left_out_are_said(
    architecture: str,
    targets: str | tuple[str, ...] | None,
    says: bool,
    tiny_model: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    load_shared_model(ModelSettings(path=str(tiny_model(architecture)), lora=LoraSettings(targets=targets)))
    assert ("without the experts of this mixture" in caplog.text) == says


@pytest.mark.parametrize(
    ("architecture", "lora", "message"),
    [
        ("llama", {"targets": "experts"}, r"the model has no layer \['experts'\]; choices: all-linear or of \['down"),
        ("mixtral", {"targets": ("experts", "wrong")}, r"no layer \['wrong'\]; choices: all-linear, experts or of"),
        ("mixtral", {"targets": "experts", "dora": True}, r"dora=true: .*a matrix for each expert.*leave dora out"),
    ],
)
def test_experts_that_cannot_be_adapted_are_refused(
    architecture: str, lora: dict[str, Any], message: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(AdapterError, match=message):
        load_shared_model(ModelSettings(path=str(tiny_model(architecture)), lora=LoraSettings(**lora)))


def test_targets_are_ends_of_paths(sites_of: Callable[..., dict[str, tuple[int, ...]]]) -> None:
    assert sites_of(targets=("q_proj", "layers.1.mlp.up_proj")) == {
        "model.layers.0.self_attn.q_proj": (64, 64),
        "model.layers.1.self_attn.q_proj": (64, 64),
        "model.layers.1.mlp.up_proj": (64, 96),
    }


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [("all", {0, 1}), (1, {1}), (2, {0, 1}), ((0,), {0}), ((0, 1), {0, 1}), ("1-1", {1}), ("0-1", {0, 1})],
)
def test_layers_are_the_last_so_many_or_a_list_or_a_range(
    sites_of: Callable[..., dict[str, tuple[int, ...]]], layers: object, chosen: set[int]
) -> None:
    assert {int(target.split(".")[2]) for target in sites_of(layers=layers, targets=("q_proj", "up_proj"))} == chosen


@pytest.mark.parametrize("layers", [0, -1, 3, (), (0, 2), (-1,), "1-2", "1-0"])
def test_layers_that_the_model_lacks_are_refused_with_those_it_has(
    sites_of: Callable[..., dict[str, tuple[int, ...]]], layers: object
) -> None:
    with pytest.raises(AdapterError, match=r"model\.lora\.layers=.*: the model has 2 layers, 0 to 1; give all"):
        sites_of(layers=layers)


def test_targets_outside_the_chosen_layers_are_refused(sites_of: Callable[..., dict[str, tuple[int, ...]]]) -> None:
    with pytest.raises(AdapterError, match=r"no layer in common; targets are, for example, model\.layers\.1\.mlp"):
        sites_of(layers=(0,), targets=("layers.1.mlp.up_proj",))


def test_the_longest_name_that_fits_decides_the_rank_of_a_target(load_tiny: Callable[..., SharedModel]) -> None:
    targets = load_tiny("llama").targets
    ranks = target_ranks(targets, {"q_proj": 8, "layers.1.self_attn.q_proj": 2, "v_proj": 4}, 4)
    assert ranks == {"model.layers.0.self_attn.q_proj": 8, "model.layers.1.self_attn.q_proj": 2}
    arrays = initial_arrays(targets, 4, mx.random.key(0), ranks=ranks)
    assert arrays["model.layers.0.self_attn.q_proj.lora_a"].shape == (64, 8)
    assert arrays["model.layers.1.self_attn.q_proj.lora_b"].shape == (2, 64)
    assert arrays["model.layers.1.self_attn.v_proj.lora_b"].shape == (4, 32)


def test_a_rank_for_what_is_no_target_is_refused(load_tiny: Callable[..., SharedModel]) -> None:
    with pytest.raises(AdapterError, match=r"model\.lora\.ranks: \['qproj'\] are no targets of this run; choices: "):
        target_ranks(load_tiny("llama").targets, {"qproj": 8}, 16)
