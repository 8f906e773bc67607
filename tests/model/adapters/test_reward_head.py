"""Reward models on disk and on their base."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from parallm.errors import AdapterError
from parallm.model.adapters.adapter import REWARD_HEAD, Adapter, make_adapter
from parallm.model.adapters.files import read_arrays, write_exactly, write_mlx, write_peft
from parallm.model.adapters.initial import initial_arrays
from parallm.model.adapters.reward_head import read_reward_model, with_reward_head
from parallm.model.load import load_shared_model
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel

Load = Callable[..., SharedModel]


def policy_of(model: SharedModel, **form: Any) -> Adapter:
    ranks = form.get("ranks", {})
    arrays = initial_arrays(model.targets, 4, mx.random.key(1), ranks=ranks)
    return make_adapter(arrays, version=9, parent=8, step=9, rank=4, alpha=8.0, **form)


def write(adapter: Adapter, folder: Path, model: SharedModel) -> Path:
    write_exactly(adapter, folder, num_layers=model.num_layers, base_name=model.name, base_sha256=model.sha256)
    return folder


def test_a_new_head_makes_version_0_of_a_reward_model_and_leaves_the_rest(nano: SharedModel) -> None:
    policy = policy_of(nano)
    made = with_reward_head(policy, nano, 5)
    assert made.arrays[REWARD_HEAD].shape == (128,)
    assert float(mx.std(made.arrays[REWARD_HEAD]).item()) == pytest.approx(128**-0.5, rel=0.3)
    assert (made.version, made.parent, made.targets) == (0, None, policy.targets)
    assert all((made.arrays[name] == array).all().item() for name, array in policy.arrays.items())
    assert made.digest == with_reward_head(policy, nano, 5).digest != with_reward_head(policy, nano, 6).digest
    assert with_reward_head(made, nano, 6) is made


@pytest.mark.parametrize("form", [{}, {"rslora": True}, {"ranks": {"model.layers.0.mlp.up_proj": 2}}], ids=str)
def test_a_reward_model_comes_back_from_disk_as_it_was(nano: SharedModel, tmp_path: Path, form: dict[str, Any]) -> None:
    made = with_reward_head(policy_of(nano, **form), nano, 5)
    found = read_reward_model(write(made, tmp_path, nano), nano)
    assert (found.digest, found.version, found.targets, found.scales) == (
        made.digest,
        made.version,
        made.targets,
        made.scales,
    )


def test_on_disk_it_is_what_peft_knows_as_a_classifier_with_one_number(nano: SharedModel, tmp_path: Path) -> None:
    made = with_reward_head(policy_of(nano), nano, 5)
    write(made, tmp_path, nano)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    tensors, _ = read_arrays(tmp_path / "adapter_model.safetensors")
    assert (tensors["base_model.model.score.weight"] == made.arrays[REWARD_HEAD][None]).all().item()


def test_mlx_lms_format_is_refused(nano: SharedModel, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="mlx-lm knows no heads"):
        write_mlx(with_reward_head(policy_of(nano), nano, 5), tmp_path / "made", num_layers=4)
    assert not (tmp_path / "made").exists()


def test_a_policy_is_no_reward_model(nano: SharedModel, tmp_path: Path) -> None:
    write_peft(policy_of(nano), tmp_path, nano.name, nano.sha256, model_type="llama")
    with pytest.raises(AdapterError, match="is no reward model: it has no reward_head"):
        read_reward_model(tmp_path, nano)


def test_a_reward_model_of_another_base_is_refused(nano: SharedModel, load_tiny: Load, tmp_path: Path) -> None:
    write(with_reward_head(policy_of(nano), nano, 5), tmp_path, nano)
    with pytest.raises(AdapterError, match=r"was trained on another base \(sha256 .*than .*Set model\.path and"):
        read_reward_model(tmp_path, load_tiny("llama"))


def test_a_run_with_more_targets_has_the_same_base(nano: SharedModel, tmp_path: Path) -> None:
    narrow = load_shared_model(ModelSettings(lora=LoraSettings(targets=("q_proj",))))
    made = with_reward_head(policy_of(narrow), narrow, 5)
    assert read_reward_model(write(made, tmp_path, narrow), nano).digest == made.digest


def test_one_from_elsewhere_is_taken_by_its_shapes_with_a_warning(
    nano: SharedModel, load_tiny: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_peft(with_reward_head(policy_of(nano), nano, 5), tmp_path, "nano", model_type="llama")
    assert read_reward_model(tmp_path, nano).version == 0
    assert "does not say which base it was trained on" in caplog.text
    with pytest.raises(AdapterError, match=r"set model\.path to the base that it was trained on"):
        read_reward_model(tmp_path, load_tiny("llama"))
