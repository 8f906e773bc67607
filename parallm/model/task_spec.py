"""Files of sentence-transformers -> `TaskSpec`: which pooling, normalization, prompts and sizes a folder says.

What is not understood is refused by name, never guessed: a wrong pooling gives vectors that look right and are not.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from parallm.errors import ModelError
from parallm.types import Pooling, TaskSpec

MODULES = "modules.json"
MAX_BYTES = 1024 * 1024
POOLING_KEYS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
"""Switches of 1_Pooling/config.json in the order in which sentence-transformers joins their vectors."""
NAMES: Mapping[str, Pooling] = {"lasttoken": "last", "weightedmean": "weighted_mean"}
"""Names in the newer `pooling_mode` that differ from ours."""


def read_task_spec(folder: Path) -> TaskSpec | None:
    """The spec of a folder with modules.json; None without that file. Raises ModelError for what is not understood."""
    if not (folder / MODULES).is_file():
        return None
    modules = _read(folder / MODULES)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{MODULES} should be a list of modules")
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(
            f"{MODULES} chains {' -> '.join(kinds)[:200]}, and only Transformer -> Pooling (-> Normalize) is known here"
        )
    path = str(modules[1].get("path", ""))
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ModelError(f"{MODULES} leads out of its folder")
    config_file = folder / "config_sentence_transformers.json"
    config = _object(config_file) if config_file.is_file() else {}
    prompts = {str(name): str(text) for name, text in (config.get("prompts") or {}).items()}
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelError(f"{config_file.name} has no prompt {str(default)[:100]!r}, its default_prompt_name")
    pooling = _object(folder / path / "config.json")
    if pooling.get("include_prompt") is False and any(prompts.values()):
        raise ModelError(f"{MODULES}: include_prompt=false leaves prompts out of the pooling, which is not known here")
    return TaskSpec(
        pooling=_pooling(pooling),
        normalizes=len(kinds) == 3,
        dimensions=_dimensions(folder),
        prompts=prompts,
        default_prompt=default,
        source=MODULES,
    )


def check_causal(folder: Path) -> None:
    """Raise ModelError for a model whose tokens see those after them: the base computes causal attention."""
    config = _object(folder / "config.json")
    names = [str(name) for name in config.get("architectures") or ()]
    if (
        config.get("is_causal") is False
        or config.get("use_bidirectional_attention")
        or any("Bidirectional" in name for name in names)
    ):
        raise ModelError("config.json says that its attention is not causal, and only causal models make vectors here")


def adds_end_token(folder: Path) -> bool:
    """Whether tokenizer_config.json asks for an end token, which transformers itself has stopped to add."""
    file = folder / "tokenizer_config.json"
    return file.is_file() and _object(file).get("add_eos_token") is True


def to_json(spec: TaskSpec) -> str:
    return json.dumps({"task": "embed"} | dataclasses.asdict(spec), sort_keys=True)


def from_json(text: str) -> TaskSpec:
    """The inverse of `to_json`. Raises ModelError."""
    try:
        fields = dict(json.loads(text))
        if (task := fields.pop("task")) != "embed":
            raise ModelError(f"its task {str(task)[:100]!r} is not known here")
        dimensions = fields["dimensions"]
        spec = TaskSpec(
            **fields
            | {"pooling": tuple(fields["pooling"]), "dimensions": None if dimensions is None else tuple(dimensions)}
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"its task cannot be read: {error}") from error
    _check_pooling(spec.pooling)
    return spec


def _pooling(config: Mapping[str, Any]) -> tuple[Pooling, ...]:
    named = config.get("pooling_mode")
    if named is not None:
        names = [named] if isinstance(named, str) else list(named)
        chosen = [NAMES.get(str(name), str(name)) for name in names]
        return _check_pooling(chosen)
    switched = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if unknown := [key for key in switched if key not in POOLING_KEYS]:
        raise ModelError(f"{MODULES}: the pooling {unknown[0][:100]} is not known here")
    return _check_pooling([name for key, name in POOLING_KEYS.items() if key in switched])


def _check_pooling(names: Sequence[str]) -> tuple[Pooling, ...]:
    known = get_args(Pooling)
    for name in names:
        if name not in known:
            raise ModelError(f"the pooling {name[:100]!r} is not known here; there are {', '.join(known)}")
    if not names:
        raise ModelError(f"{MODULES}: its Pooling names no mode")
    return tuple(pooling for name in names for pooling in known if pooling == name)


def _dimensions(folder: Path) -> tuple[int, ...] | None:
    file = folder / "config.json"
    config = _object(file) if file.is_file() else {}
    if sizes := config.get("matryoshka_dimensions"):
        return tuple(sorted(int(size) for size in sizes))
    return () if config.get("is_matryoshka") else None


def _object(path: Path) -> dict[str, Any]:
    value = _read(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} should be a JSON object")
    return value


def _read(path: Path) -> Any:
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:  # a pipe would be waited for
            raise ModelError(f"{path.parent.name}/{path.name} is no file of at most {MAX_BYTES} bytes")
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.parent.name}/{path.name} cannot be read: {error}") from error
