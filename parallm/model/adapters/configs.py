"""adapter_config.json of mlx-lm's and PEFT's adapters, read and written by `files.py`.

Every value that is used is checked. Keys that do not change what is computed from the weights, such as those of
training, are ignored.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import mlx.core as mx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from parallm.errors import AdapterError
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.expert_files import ParameterLora
from parallm.model.adapters.module_names import check_keys, layered_names, outside_layers, to_pattern
from parallm.model.lora.joined import padded

CONFIG = "adapter_config.json"
PEFT_HEADS = {"classifier", "score"}
"""Modules that PEFT saves of a model for sequence classification, which has one of the two."""
MAX_SHOWN = 60  # characters of a value in a message

PEFT_REFUSED: Mapping[str, str] = {
    "modules_to_save": "it replaces whole modules",
    "trainable_token_indices": "it replaces embeddings of tokens",
    "lora_bias": "it adds biases",
    "layer_replication": "it repeats layers of the base",
    "alora_invocation_tokens": "it is active after certain tokens only",
    "use_qalora": "it is a variant of LoRA that is not computed here",
    "use_bdlora": "it is a variant of LoRA that is not computed here",
    "kasa_config": "it is a variant of LoRA that is not computed here",
    "arrow_config": "it is a variant of LoRA that is not computed here",
}
"""Keys of LoraConfig that no adapter here can follow, and why."""
CHANGING_THE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga", "mica")
"""Values of init_lora_weights with which PEFT changes the base's weights, too."""

Rank = Annotated[int, Field(ge=1, le=65536)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Dropout = Annotated[float, Field(ge=0, lt=1)]


class _Config(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


ConfigType = TypeVar("ConfigType", bound=_Config)


class LoraParameters(_Config):
    rank: Rank
    scale: Positive
    dropout: Dropout = 0.0


class MlxConfig(_Config):
    """mlx-lm's config."""

    fine_tune_type: Literal["lora", "dora"] = "lora"
    lora_parameters: LoraParameters


class PeftConfig(_Config):
    """PEFT's LoraConfig, with its defaults for keys that newer versions added."""

    peft_type: Literal["LORA"]
    task_type: str | None = None
    r: Rank
    lora_alpha: Positive
    lora_dropout: Dropout = 0.0
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Positive] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: list[str] | None = None
    target_parameters: list[str] | None = None
    peft_version: str | None = None
    init_lora_weights: bool | str | None = True

    @property
    def has_head(self) -> bool:
        return self.task_type == "SEQ_CLS" and set(self.modules_to_save or ()) <= PEFT_HEADS


def parse_config(content: str | bytes) -> MlxConfig | PeftConfig:
    """The config of an adapter in either format. Raises AdapterError naming the key and its value."""
    values = json_object(content, CONFIG)
    if "peft_type" not in values:
        return _parsed(MlxConfig, values)
    config = _parsed(PeftConfig, values)
    _check_supported(config, values)
    for pattern in (config.rank_pattern, config.alpha_pattern):
        check_keys(pattern or ())
    return config


def json_object(content: str | bytes, what: str) -> dict[str, Any]:
    """Raises AdapterError unless `content` is an object of JSON without NaN and infinity."""
    try:
        value = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{what} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise AdapterError(f"{what} is no JSON object")
    return value


def _parsed(kind: type[ConfigType], values: Mapping[str, Any]) -> ConfigType:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part)[:MAX_SHOWN] for part in first["loc"])
        if first["type"] == "missing":
            raise AdapterError(f"{CONFIG} lacks {key}") from None
        reason = first["msg"].removeprefix("Input ")
        raise AdapterError(f"{key} in {CONFIG} is {_shown(first['input'])}: it {reason}") from None


def _check_supported(config: PeftConfig, values: Mapping[str, Any]) -> None:
    for key, why in PEFT_REFUSED.items():
        if values.get(key) and not (key == "modules_to_save" and config.has_head):
            raise AdapterError(f"{key} in {CONFIG} is {_shown(values[key])}: {why}")
    start = config.init_lora_weights
    if isinstance(start, str) and start.lower().startswith(CHANGING_THE_BASE):
        raise AdapterError(
            f"init_lora_weights in {CONFIG} is {_shown(start)}: it changes the base, too; save the adapter with "
            "path_initial_model_for_weight_conversion of PEFT's save_pretrained"
        )


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except ValueError:  # an integer of more digits than Python writes
        text = type(value).__name__
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def mlx_config(adapter: Adapter, num_layers: int) -> dict[str, Any]:
    """mlx-lm's config, which has one rank and one scale: those of `with_one_scale`."""
    keys, depth = _mlx_keys(adapter.targets, num_layers)
    rank = max(adapter.ranks.get(target, adapter.rank) for target in adapter.targets)
    scale = adapter.alpha / (math.sqrt(adapter.rank) if adapter.rslora else adapter.rank)
    return {
        "fine_tune_type": "dora" if adapter.is_dora else "lora",
        "num_layers": depth,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": adapter.dropout, "keys": keys},
    }


def _mlx_keys(targets: tuple[str, ...], num_layers: int) -> tuple[list[str], int]:
    """The names in mlx-lm's config, and the number of last layers that they concern: names within a layer where these
    all have the same targets, which other MLX programs expect, else full paths."""
    layered = layered_names(targets)
    if layered is None or layered[1] != list(range(num_layers - len(layered[1]), num_layers)):
        return list(targets), num_layers
    return [*layered[0], *outside_layers(targets)], len(layered[1])


def with_one_scale(adapter: Adapter, rank: int, scale: float) -> dict[str, mx.array]:
    """Arrays with the same products, all of this rank and scale."""
    arrays = dict(adapter.arrays)
    for target, own_scale in adapter.scales.items():
        a, b = f"{target}.lora_a", f"{target}.lora_b"
        arrays[a] = padded(arrays[a], -1, 0, rank)
        arrays[b] = padded(arrays[b] * (own_scale / scale), -2, 0, rank)
    return arrays


def peft_config(
    adapter: Adapter, base_name: str, modules: Mapping[str, str], experts: Sequence[ParameterLora] = ()
) -> dict[str, Any]:
    """`modules` are the names of the targets in the file; `experts` are those of parameters."""
    targets = list(modules.values())
    # beside a text model there may be others, whose layers have the same names
    is_wrapped = any("language_model" in target.split(".") for target in targets)
    is_embed = adapter.task is not None and adapter.task.task == "embed"
    # PEFT looks for `layers` behind a dot, and the trunk alone has none before it
    layered = None if is_wrapped or is_embed or outside_layers(targets) else layered_names(targets)
    ranks = {modules[target]: rank for target, rank in adapter.ranks.items() if target in modules}
    ranks |= {one.name: one.rank for one in experts if one.rank != adapter.rank}
    alphas = {modules[target]: _whole(alpha) for target, alpha in adapter.alphas.items() if target in modules}
    alphas |= {one.name: _whole(one.alpha) for one in experts if not math.isclose(one.alpha, adapter.alpha)}
    named = [*targets, *(one.name for one in experts)]
    has_head = adapter.head is not None
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_head else "FEATURE_EXTRACTION" if is_embed else "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": adapter.rank,
        "lora_alpha": _whole(adapter.alpha),
        "rank_pattern": to_pattern(ranks, named),
        "alpha_pattern": to_pattern(alphas, named),
        "lora_dropout": 0.0 if experts else adapter.dropout,  # PEFT loads no other beside parameters
        "target_modules": layered[0] if layered else targets,
        "layers_to_transform": layered[1] if layered else None,
        "layers_pattern": "layers" if layered else None,
        "target_parameters": [one.name for one in experts] or None,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.is_dora,
        "bias": "none",
        "modules_to_save": ["score"] if has_head else None,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _whole(alpha: float) -> float | int:
    return int(alpha) if alpha.is_integer() else alpha
