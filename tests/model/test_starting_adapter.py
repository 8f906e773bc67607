"""A given adapter where nothing is trained: the layers that are chosen are those that adapters may have."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from parallm.model.adapter import make_adapter
from parallm.model.adapter_files import write_peft
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.model.starting_adapter import starting_adapter

SITE = "model.layers.0.self_attn.q_proj"


def test_a_server_may_have_more_layers_than_its_first_adapter(
    load_tiny: Callable[..., SharedModel], tmp_path: Path
) -> None:
    arrays = {f"{SITE}.lora_a": mx.ones((64, 4)), f"{SITE}.lora_b": mx.ones((4, 64))}
    write_peft(make_adapter(arrays, version=5, rank=4, alpha=8.0), tmp_path, "llama")
    settings = ModelSettings(adapter=str(tmp_path), lora=LoraSettings(targets="all-linear"))
    adapter = starting_adapter(settings, load_tiny("llama"), seed=0, is_trained=False)
    assert (adapter.targets, adapter.version) == ((SITE,), 5)
