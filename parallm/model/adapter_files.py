"""Adapters on disk, in mlx-lm's and in PEFT's format, LoRA and DoRA, both written and read.

A reward model is written in PEFT's format alone, as transformers' models for sequence classification have it: one
number for each sequence, read at its last token.

Not read, and refused by name: full fine-tunes, adapted embeddings or experts, and pickled PyTorch files.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx

from parallm.errors import AdapterError
from parallm.model.adapter import Adapter, make_adapter
from parallm.model.adapter_arrays import REWARD_HEAD, arrays_digest
from parallm.model.adapter_configs import evened, mlx_config, peft_config
from parallm.model.peft_names import left_out_by_peft, modules_of
from parallm.model.stored_adapter import StoredAdapter, from_mlx, from_peft
from parallm.model.stored_configs import CONFIG, MlxConfig, parse_config
from parallm.types import POLICY

logger = logging.getLogger(__name__)

MLX_WEIGHTS = "adapters.safetensors"
PEFT_WEIGHTS = "adapter_model.safetensors"


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


def write_peft(adapter: Adapter, folder: Path, base_name: str, base_sha256: str = "", *, model_type: str) -> None:
    """Write what `peft.PeftModel.from_pretrained(base, folder)` reads; `base_name` is a hub id or folder for people.

    `model_type` is that of the base, by which transformers' names of its layers are known. `base_sha256` is the base's
    fingerprint, which `base_of` tells whoever reads. Raises AdapterError where these names are not known, OSError if
    the disk does not take it.
    """
    modules = modules_of(adapter.targets, model_type)
    if lost := left_out_by_peft(adapter.targets, model_type):
        logger.warning(
            "PEFT 0.21 itself does not load %d layers of this adapter of %s, such as %s; other programs may",
            *(len(lost), model_type, modules[lost[0]]),
        )
    _write_peft(adapter, folder, base_name, base_sha256, modules)


def write_exactly(adapter: Adapter, folder: Path, *, num_layers: int, base_name: str, base_sha256: str = "") -> None:
    """Write mlx-lm's format where it can hold the adapter as it is, else PEFT's with mlx-lm's names of the layers.

    It comes back equal to the bit.
    """
    if adapter.ranks or adapter.alphas or REWARD_HEAD in adapter.arrays:
        _write_peft(adapter, folder, base_name, base_sha256, {site: site for site in adapter.targets})
    else:
        write_mlx(adapter, folder, num_layers=num_layers)


def _write_peft(adapter: Adapter, folder: Path, base_name: str, base_sha256: str, modules: Mapping[str, str]) -> None:
    """`modules` are the names of the sites in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(peft_config(adapter, base_name, modules), indent=2) + "\n")
    tensors: dict[str, mx.array] = {}
    for site, module in modules.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = adapter.arrays[f"{site}.lora_a"].T
        tensors[f"base_model.model.{module}.lora_B.weight"] = adapter.arrays[f"{site}.lora_b"].T
        if adapter.is_dora:
            tensors[f"base_model.model.{module}.lora_magnitude_vector"] = adapter.arrays[f"{site}.m"]
    if REWARD_HEAD in adapter.arrays:
        tensors["base_model.model.score.weight"] = adapter.arrays[REWARD_HEAD][None]
    metadata = {"format": "pt", "base_sha256": base_sha256} | _metadata(adapter)
    write_arrays(folder / PEFT_WEIGHTS, tensors, metadata)


def read_adapter(
    folder: Path,
    sites: Mapping[str, tuple[int, int]] | None = None,
    *,
    model_type: str = "",
    name: str | None = None,
    version: int | None = None,
) -> Adapter:
    """Read an adapter of either format. It may cover fewer sites than the base has.

    `sites` (site -> inputs, outputs of the base) are what it has to fit. `model_type` is that of the base: files of
    PEFT may call its layers as transformers does. `name` and `version` replace those in the file; a file from
    elsewhere has none and becomes version 0 of `policy`. Raises AdapterError.
    """
    stored = _read_stored(folder, model_type)
    known = stored.metadata
    try:
        if sites is not None:
            stored.check_sites(sites)
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
    return _read_stored(folder, "").metadata.get("base_sha256", "")


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


def _read_stored(folder: Path, model_type: str) -> StoredAdapter:
    try:
        config = parse_config(_text(folder / CONFIG))
        arrays, metadata = read_arrays(folder / (MLX_WEIGHTS if isinstance(config, MlxConfig) else PEFT_WEIGHTS))
        if isinstance(config, MlxConfig):
            return from_mlx(config, arrays, metadata)
        return from_peft(config, arrays, metadata, model_type)
    except FileNotFoundError as error:
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "no such folder"
        raise AdapterError(
            f"{folder} is no adapter: it needs {CONFIG} and {MLX_WEIGHTS} (mlx-lm) or {PEFT_WEIGHTS} (PEFT, saved with "
            f"safe_serialization=True); found: {found}"
        ) from error
    except (OSError, ValueError, AdapterError) as error:
        raise AdapterError(f"the adapter in {folder} cannot be read: {error}") from error


def _text(path: Path) -> str:
    if not path.is_file():  # a pipe would be waited for
        raise FileNotFoundError(f"{path} does not exist")
    return path.read_text()


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
