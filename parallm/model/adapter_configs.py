"""Config files of mlx-lm's and PEFT's adapters as they are written; `stored_configs` reads them."""

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from parallm.model.adapter import Adapter
from parallm.model.adapter_arrays import REWARD_HEAD
from parallm.model.site_names import layered_names, outside_layers, to_pattern


def mlx_config(adapter: Adapter, num_layers: int) -> dict[str, Any]:
    """For mlx-lm, which knows one rank and one scale: those of arrays that are `evened`."""
    keys, depth = _mlx_keys(adapter.targets, num_layers)
    rank = max(adapter.ranks.get(site, adapter.rank) for site in adapter.targets)
    scale = adapter.alpha / (math.sqrt(adapter.rank) if adapter.rslora else adapter.rank)
    return {
        "fine_tune_type": "dora" if adapter.is_dora else "lora",
        "num_layers": depth,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": adapter.dropout, "keys": keys},
    }


def _mlx_keys(targets: tuple[str, ...], num_layers: int) -> tuple[list[str], int]:
    """What mlx-lm's config names, and how many of the last layers it concerns.

    Names within a layer where the last layers all have the same targets, which other MLX programs expect; else full
    paths.
    """
    found = layered_names(targets)
    if found is None or found.layers != tuple(range(num_layers - len(found.layers), num_layers)):
        return list(targets), num_layers
    return [*found.names, *outside_layers(targets)], len(found.layers)


def evened(adapter: Adapter, rank: int, scale: float) -> dict[str, mx.array]:
    """Arrays with the same products, all of one rank and scale."""
    arrays = dict(adapter.arrays)
    for site, own_scale in adapter.scales.items():
        a, b = f"{site}.lora_a", f"{site}.lora_b"
        missing = rank - arrays[a].shape[1]
        arrays[a] = mx.pad(arrays[a], ((0, 0), (0, missing)))
        arrays[b] = mx.pad(arrays[b] * (own_scale / scale), ((0, missing), (0, 0)))
    return arrays


def peft_config(adapter: Adapter, base_name: str, modules: Mapping[str, str]) -> dict[str, Any]:
    """`modules` are the names of the sites in the file."""
    targets = list(modules.values())
    # beside a text model there may be others, whose layers have the same names
    is_wrapped = any("language_model" in target.split(".") for target in targets)
    found = None if is_wrapped or outside_layers(targets) else layered_names(targets)
    ranks = {modules[site]: rank for site, rank in adapter.ranks.items()}
    alphas = {modules[site]: _whole(alpha) for site, alpha in adapter.alphas.items()}
    is_reward_model = REWARD_HEAD in adapter.arrays
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_reward_model else "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": adapter.rank,
        "lora_alpha": _whole(adapter.alpha),
        "rank_pattern": to_pattern(ranks, targets),
        "alpha_pattern": to_pattern(alphas, targets),
        "lora_dropout": adapter.dropout,
        "target_modules": list(found.names) if found else targets,
        "layers_to_transform": list(found.layers) if found else None,
        "layers_pattern": "layers" if found else None,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.is_dora,
        "bias": "none",
        "modules_to_save": ["score"] if is_reward_model else None,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _whole(alpha: float) -> float | int:
    return int(alpha) if alpha.is_integer() else alpha
