"""Adapters on disk, in mlx-lm's and in PEFT's format, LoRA and DoRA, both written and read.

A reward model is written in PEFT's format alone, as transformers' models for sequence classification have it: one
number for each sequence, read at its last token.

Not read, and refused by name: full fine-tunes, adapted embeddings or experts, and pickled PyTorch files.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from parallm.errors import AdapterError
from parallm.model.adapter import Adapter, make_adapter
from parallm.model.adapter_arrays import REWARD_HEAD, arrays_digest
from parallm.model.adapter_configs import evened, mlx_config, peft_config
from parallm.model.site_names import from_pattern
from parallm.types import POLICY

CONFIG = "adapter_config.json"
MLX_WEIGHTS = "adapters.safetensors"
PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<site>.+)\.lora_(?:(?P<part>[AB])(?:\.default)?\.weight|"
    r"magnitude_vector(?:\.default)?(?:\.weight)?)"
)
PEFT_HEAD = re.compile(r"(?:base_model\.model\.)?score(?:\.modules_to_save\.default)?\.weight")
PEFT_HEADS = {"classifier", "score"}
"""What PEFT saves of a model for sequence classification, whichever of the two it has."""
PEFT_REFUSED = ("modules_to_save", "lora_bias", "target_parameters", "trainable_token_indices")


def write_mlx(adapter: Adapter, folder: Path, *, num_layers: int) -> None:
    """Write what `mlx_lm.load(..., adapter_path=folder)` reads; `num_layers` is the depth of the base.

    The format has one rank and one scale: smaller ranks are padded with zeros, and other scales multiplied into B.
    Raises AdapterError for a reward model, OSError if the disk does not take it.
    """
    if REWARD_HEAD in adapter.arrays:
        raise AdapterError("mlx-lm knows no reward models: write this one in PEFT's format, formats=[peft]")
    folder.mkdir(parents=True, exist_ok=True)
    config, arrays = mlx_config(adapter, num_layers), adapter.arrays
    metadata = {"format": "mlx"} | _metadata(adapter)
    if adapter.ranks or adapter.alphas:
        rank, scale = config["lora_parameters"]["rank"], config["lora_parameters"]["scale"]
        arrays = evened(adapter, rank, scale)
        metadata |= {"alpha": repr(scale * rank), "rslora": "", "digest": arrays_digest(arrays)}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    write_arrays(folder / MLX_WEIGHTS, arrays, metadata)


def write_peft(adapter: Adapter, folder: Path, base_name: str, base_sha256: str = "") -> None:
    """Write what `peft.PeftModel.from_pretrained(base, folder)` reads; `base_name` is a hub id or folder for people.

    `base_sha256` is the base's fingerprint, which `base_of` tells whoever reads. Raises OSError if the disk does not
    take it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(peft_config(adapter, base_name), indent=2) + "\n")
    tensors: dict[str, mx.array] = {}
    for site in adapter.targets:
        tensors[f"base_model.model.{site}.lora_A.weight"] = adapter.arrays[f"{site}.lora_a"].T
        tensors[f"base_model.model.{site}.lora_B.weight"] = adapter.arrays[f"{site}.lora_b"].T
        if adapter.is_dora:
            tensors[f"base_model.model.{site}.lora_magnitude_vector"] = adapter.arrays[f"{site}.m"]
    if REWARD_HEAD in adapter.arrays:
        tensors["base_model.model.score.weight"] = adapter.arrays[REWARD_HEAD][None]
    metadata = {"format": "pt", "base_sha256": base_sha256} | _metadata(adapter)
    write_arrays(folder / PEFT_WEIGHTS, tensors, metadata)


def write_exactly(adapter: Adapter, folder: Path, *, num_layers: int, base_name: str, base_sha256: str = "") -> None:
    """Write mlx-lm's format where it can hold the adapter as it is, else PEFT's: it comes back equal to the bit."""
    if adapter.ranks or adapter.alphas or REWARD_HEAD in adapter.arrays:
        write_peft(adapter, folder, base_name, base_sha256)
    else:
        write_mlx(adapter, folder, num_layers=num_layers)


def read_adapter(
    folder: Path,
    sites: Mapping[str, tuple[int, int]] | None = None,
    *,
    name: str | None = None,
    version: int | None = None,
) -> Adapter:
    """Read an adapter of either format. It may cover fewer sites than the base has.

    `sites` (site -> inputs, outputs of the base) are what it has to fit. `name` and `version` replace those in the
    file; a file from elsewhere has none and becomes version 0 of `policy`. Raises AdapterError.
    """
    stored = _read_stored(folder)
    if sites is not None:
        _check_sites(folder, stored, sites)
    known = stored.metadata
    try:
        adapter = make_adapter(
            stored.arrays,
            name=name if name is not None else known.get("name", POLICY),
            version=version if version is not None else int(known.get("version", "0")),
            parent=int(known["parent"]) if known.get("parent") else None,
            step=int(known.get("step", "0")),
            rank=stored.rank,
            alpha=stored.alpha,
            ranks=stored.ranks,
            alphas=stored.alphas,
            rslora=stored.rslora,
            dropout=stored.dropout,
        )
    except (AdapterError, ValueError) as error:
        raise AdapterError(f"the adapter in {folder} cannot be used: {error}") from error
    if known.get("digest", adapter.digest) != adapter.digest:
        raise AdapterError(f"the adapter in {folder} is damaged: its arrays are not those that were saved")
    return adapter


def base_of(folder: Path) -> str:
    """Fingerprint of the base that an adapter in PEFT's format was trained on; empty where the file does not say it.

    Raises AdapterError if the adapter cannot be read.
    """
    return _read_stored(folder).metadata.get("base_sha256", "")


def from_peft_names(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Tensors under PEFT's names as arrays of an adapter; other names stay as they are."""
    arrays: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        match = PEFT_TENSOR.fullmatch(name)
        array_name = name if match is None else _array_name(match)
        arrays[array_name] = tensor if match is None else mx.contiguous(tensor.T)
    return arrays


def write_arrays(path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, evaluating the arrays: equal ones make equal bytes. Raises OSError if the disk does not
    take it."""
    # a file object rather than a path: MLX's own writer loses the reason for a failure
    with path.open("wb") as file:
        mx.save_safetensors(file, dict(sorted(arrays.items())), dict(metadata))


def read_arrays(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Evaluated arrays and metadata of a safetensors file. Raises OSError, or ValueError if it is not whole."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        # the stub unites the results of all file formats; for safetensors it is this one
        loaded = cast(tuple[dict[str, mx.array], dict[str, str]], mx.load(str(path), return_metadata=True))
        mx.eval(loaded[0])
    except RuntimeError as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from error
    return loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    arrays: dict[str, mx.array]
    metadata: dict[str, str]
    rank: int
    alpha: float
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    rslora: bool
    dropout: float


def _read_stored(folder: Path) -> _Stored:
    try:
        config = json.loads((folder / CONFIG).read_text())
        return _read_peft(folder, config) if "peft_type" in config else _read_mlx(folder, config)
    except FileNotFoundError as error:
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "no such folder"
        raise AdapterError(
            f"{folder} is no adapter: it needs {CONFIG} and {MLX_WEIGHTS} (mlx-lm) or {PEFT_WEIGHTS} (PEFT, saved with "
            f"safe_serialization=True); found: {found}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, re.error) as error:
        raise AdapterError(f"the adapter in {folder} cannot be read: {type(error).__name__}: {error}") from error


def _read_mlx(folder: Path, config: Mapping[str, Any]) -> _Stored:
    if config.get("fine_tune_type", "lora") not in ("lora", "dora"):
        raise AdapterError(f"{folder} holds fine_tune_type {config['fine_tune_type']!r}; lora and dora can be read")
    lora = config["lora_parameters"]
    arrays, metadata = read_arrays(folder / MLX_WEIGHTS)
    _check_magnitudes(folder, arrays, config.get("fine_tune_type") == "dora")
    rank, rslora = int(lora["rank"]), bool(metadata.get("rslora"))
    alpha = float(lora["scale"]) * (math.sqrt(rank) if rslora else rank)
    exact = float(metadata.get("alpha", alpha))  # alpha / rank * rank need not be alpha
    return _Stored(
        arrays=arrays,
        metadata=metadata,
        rank=rank,
        alpha=exact if math.isclose(exact, alpha) else alpha,
        rslora=rslora,
        dropout=float(lora.get("dropout", 0.0)),
    )


def _read_peft(folder: Path, config: Mapping[str, Any]) -> _Stored:
    has_head = config.get("task_type") == "SEQ_CLS" and set(config.get("modules_to_save") or ()) <= PEFT_HEADS
    refused = [key for key in PEFT_REFUSED if config.get(key) and not (has_head and key == "modules_to_save")]
    if config["peft_type"] != "LORA" or refused:
        raise AdapterError(f"{folder} holds {config['peft_type']} with {refused}; only linear layers can be adapted")
    tensors, metadata = read_arrays(folder / PEFT_WEIGHTS)
    arrays: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        if has_head and PEFT_HEAD.fullmatch(name):
            arrays[REWARD_HEAD] = _one_score(folder, tensor)
            continue
        match = PEFT_TENSOR.fullmatch(name)
        if match is None:
            raise AdapterError(f"{folder} holds {name}, which is no lora_A, lora_B or magnitude of a linear layer")
        arrays[_array_name(match)] = mx.contiguous(tensor.T)
    _check_magnitudes(folder, arrays, bool(config.get("use_dora")))
    sites = sorted({name.rpartition(".")[0] for name in arrays if name != REWARD_HEAD})
    return _Stored(
        arrays=arrays,
        metadata=metadata,
        rank=int(config["r"]),
        alpha=float(config["lora_alpha"]),
        ranks=from_pattern(config.get("rank_pattern") or {}, sites),
        alphas=from_pattern(config.get("alpha_pattern") or {}, sites),
        rslora=bool(config.get("use_rslora")),
        dropout=float(config.get("lora_dropout", 0.0)),
    )


def _array_name(match: re.Match[str]) -> str:
    part = f"lora_{match['part'].lower()}" if match["part"] else "m"
    return f"{match['site']}.{part}"


def _one_score(folder: Path, tensor: mx.array) -> mx.array:
    if tensor.ndim != 2 or tensor.shape[0] != 1:
        raise AdapterError(f"{folder} classifies with a head of shape {tensor.shape}; a reward model has (1, hidden)")
    return mx.contiguous(tensor[0])


def _check_magnitudes(folder: Path, arrays: Mapping[str, mx.array], is_dora: bool) -> None:
    if is_dora != any(name.endswith(".m") for name in arrays):
        kind, other = ("DoRA", "no magnitudes") if is_dora else ("LoRA", "magnitudes of DoRA")
        raise AdapterError(f"{folder / CONFIG} says that it is {kind}, and its weights hold {other}")


def _check_sites(folder: Path, stored: _Stored, sites: Mapping[str, tuple[int, int]]) -> None:
    for name in sorted(stored.arrays.keys() - {REWARD_HEAD}):
        site, _, part = name.rpartition(".")
        shape = stored.arrays[name].shape
        if site not in sites:
            raise AdapterError(
                f"the adapter in {folder} has {name} {shape}, but {site} is no LoRA site here; there are {len(sites)}, "
                f"such as {min(sites, default='none')}; load the base it was trained on, or leave "
                "model.lora.targets and model.lora.layers out"
            )
        (inputs, outputs), rank = sites[site], stored.ranks.get(site, stored.rank)
        expected = {"lora_a": (inputs, rank), "lora_b": (rank, outputs), "m": (outputs,)}.get(part, shape)
        if shape != expected:
            raise AdapterError(
                f"the adapter in {folder} does not fit this base: {name} has shape {shape}, expected {expected}; "
                "set model.path to the base that it was trained on"
            )


def _metadata(adapter: Adapter) -> dict[str, str]:
    return {
        "name": adapter.name,
        "version": str(adapter.version),
        "parent": "" if adapter.parent is None else str(adapter.parent),
        "step": str(adapter.step),
        "alpha": repr(adapter.alpha),
        "rslora": "yes" if adapter.rslora else "",
        "digest": adapter.digest,
    }
