"""Adapters on disk, in mlx-lm's and in PEFT's format, LoRA and DoRA, both written and read.

Adapters with a head are written in PEFT's format alone, as transformers' models for sequence classification have it: a
number for each label of a sequence, read at its last token. Experts: see `expert_files.py`. Full fine-tunes, adapted
embeddings, and pickled PyTorch files are refused by name.
"""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import mlx.core as mx

from parallm.errors import AdapterError, ModelError
from parallm.model.adapters.adapter import HEAD, HEADS, REWARD_HEAD, Adapter, arrays_digest, make_adapter
from parallm.model.adapters.configs import (
    CONFIG,
    MlxConfig,
    PeftConfig,
    mlx_config,
    parse_config,
    peft_config,
    with_one_scale,
)
from parallm.model.adapters.expert_files import ParameterLora, from_parameters, parameter_names, to_parameters
from parallm.model.adapters.module_names import left_out_by_peft, modules_of, names_to_read, values_by_name
from parallm.model.lora.targets import ROUTERS, Shape
from parallm.model.task_spec import from_json, head_spec, read_task_spec, to_json
from parallm.types import POLICY, TaskSpec

logger = logging.getLogger(__name__)

MLX_WEIGHTS = "adapters.safetensors"
PEFT_WEIGHTS = "adapter_model.safetensors"
EXPERTS = "experts"
"""Metadata of a file written here in PEFT's format: the targets that are experts, as JSON."""
TRUNK = "model."
"""What the names of a whole model's layers begin with, and those of its trunk do not."""
PEFT_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:(?P<part>[AB])(?:\.default)?\.weight|"
    r"magnitude_vector(?:\.default)?(?:\.weight)?)"
)
PEFT_HEAD = re.compile(r"(?:base_model\.model\.)?score(?:\.modules_to_save\.default)?\.weight")

Arrays = Mapping[str, mx.array]


def check_fit(adapter: Adapter, targets: Mapping[str, Shape]) -> None:
    """Raise AdapterError unless every array fits a target of the base."""
    for name in sorted(adapter.arrays.keys() - HEADS):
        target, _, part = name.rpartition(".")
        shape = adapter.arrays[name].shape
        if target not in targets:
            way_out = _way_out(target, targets, is_expert=len(shape) == 3)
            raise AdapterError(f"it has {name} {shape}, but {target} is no LoRA target here; {way_out}")
        (*stack, inputs, outputs), rank = targets[target], adapter.ranks.get(target, adapter.rank)
        expected = {"lora_a": (*stack, inputs, rank), "lora_b": (*stack, rank, outputs), "m": (outputs,)}[part]
        if shape != expected:
            raise AdapterError(
                f"it does not fit this base: {name} has shape {shape}, expected {expected}; set model.path to the "
                "base that it was trained on"
            )


def _from_mlx(config: MlxConfig, arrays: Arrays, metadata: Mapping[str, str], identity: Mapping[str, Any]) -> Adapter:
    arrays = _with_experts_turned(arrays)
    _check_magnitudes(arrays, config.fine_tune_type == "dora")
    lora, rslora = config.lora_parameters, bool(metadata.get("rslora"))
    alpha = lora.scale * (math.sqrt(lora.rank) if rslora else lora.rank)
    exact = float(metadata.get("alpha", alpha))  # alpha / rank * rank need not be alpha
    return make_adapter(
        arrays,
        rank=lora.rank,
        alpha=exact if math.isclose(exact, alpha) else alpha,
        rslora=rslora,
        dropout=lora.dropout,
        **identity,
    )


def _from_peft(
    config: PeftConfig,
    tensors: Arrays,
    model_type: str,
    identity: Mapping[str, Any],
    *,
    experts: tuple[dict[str, mx.array], dict[str, str]],
    is_ours: bool,
    is_classifier: bool,
) -> Adapter:
    """`experts`: their arrays, and the parameter of each; `is_classifier`: a head of one row is no reward model's."""
    modules: dict[str, str] = {}
    arrays = from_peft_names(tensors, model_type, is_ours=is_ours, modules=modules)
    for name in arrays.keys() & tensors.keys():
        if not (config.has_head and PEFT_HEAD.fullmatch(name)):
            raise AdapterError(f"it holds {name}, which is no lora_A, lora_B or magnitude of a linear layer")
        head = arrays.pop(name)
        arrays |= {HEAD: head} if is_classifier or head.shape[0] != 1 else {REWARD_HEAD: mx.contiguous(head[0])}
    _check_magnitudes(arrays, config.use_dora)
    expert_arrays, parameters = experts
    names = {**modules, **parameters}
    ranks = values_by_name(config.rank_pattern or {}, names.values())
    alphas = values_by_name(config.alpha_pattern or {}, names.values())
    own_ranks = {target: ranks.get(name, config.r) for target, name in names.items()}
    own_alphas = {target: alphas.get(name, config.lora_alpha) for target, name in names.items()}
    for target in parameters:
        own = expert_arrays[f"{target}.lora_a"].shape[-1]  # half of the parameter's where gate and up are apart
        share = own / own_ranks[target]
        alpha = own_alphas[target] * (math.sqrt(share) if config.use_rslora else share)
        own_ranks[target] = own
        own_alphas[target] = config.lora_alpha if math.isclose(alpha, config.lora_alpha) else alpha
    return make_adapter(
        arrays | expert_arrays,
        rank=config.r,
        alpha=config.lora_alpha,
        ranks=own_ranks,
        alphas=own_alphas,
        rslora=config.use_rslora,
        dropout=config.lora_dropout,
        **identity,
    )


def from_peft_names(
    tensors: Arrays, model_type: str, *, is_ours: bool = False, modules: dict[str, str] | None = None
) -> dict[str, mx.array]:
    """Tensors under PEFT's names as arrays of an adapter; other names stay as they are.

    `model_type` is that of the base, by which its layers are known. `modules` gets the names in the file by target.
    Raises AdapterError where PEFT's adapters of this type have other numbers, unless `is_ours`.
    """
    arrays: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        match = PEFT_TENSOR.fullmatch(name)
        if match is None:
            arrays[name] = tensor
            continue
        target = names_to_read(model_type, is_ours=is_ours).from_peft(match["module"])
        part = f"lora_{match['part'].lower()}" if match["part"] else "m"
        # three axes: experts, as `write_exactly` keeps them
        arrays[f"{target}.{part}"] = mx.contiguous(tensor if tensor.ndim == 1 else tensor.swapaxes(-1, -2))
        if modules is not None:
            modules[target] = match["module"]
    return arrays


def _with_experts_turned(arrays: Arrays) -> dict[str, mx.array]:
    """Between the arrays of an adapter and mlx-lm's: those of experts, (E, rank, inputs) and (E, outputs, rank) there,
    are transposed, and those of linear layers are not."""
    return {name: mx.contiguous(array.swapaxes(-1, -2)) if array.ndim == 3 else array for name, array in arrays.items()}


def _check_magnitudes(arrays: Arrays, is_dora: bool) -> None:
    if is_dora != any(name.endswith(".m") for name in arrays):
        kind, other = ("DoRA", "no magnitudes") if is_dora else ("LoRA", "magnitudes of DoRA")
        raise AdapterError(f"{CONFIG} says that it is {kind}, and its weights hold {other}")


def _way_out(target: str, targets: Mapping[str, Shape], *, is_expert: bool) -> str:
    if is_expert:
        return "it adapts a mixture's experts: add experts to model.lora.targets, e.g. [all-linear,experts]"
    if ROUTERS & set(target.split(".")):
        return "it is a router, which all-linear leaves out: name it in model.lora.targets beside all other layers"
    return (
        f"there are {len(targets)}, such as {min(targets, default='none')}; load the base it was trained on, or leave "
        "model.lora.targets and model.lora.layers out"
    )


def write_mlx(adapter: Adapter, folder: Path, *, num_layers: int) -> None:
    """Write what `mlx_lm.load(..., adapter_path=folder)` reads; `num_layers` is the depth of the base.

    The format has one rank and one scale: smaller ranks are padded with zeros, and other scales multiplied into B.
    Raises AdapterError for an adapter with a head, OSError if the disk does not take it.
    """
    if adapter.head is not None:
        raise AdapterError("mlx-lm knows no heads of adapters: write this one in PEFT's format, formats=[peft]")
    folder.mkdir(parents=True, exist_ok=True)
    config, arrays = mlx_config(adapter, num_layers), adapter.arrays
    metadata = {"format": "mlx"} | _metadata(adapter)
    if adapter.ranks or adapter.alphas:
        rank, scale = config["lora_parameters"]["rank"], config["lora_parameters"]["scale"]
        arrays = with_one_scale(adapter, rank, scale)
        metadata |= {"alpha": repr(scale * rank), "rslora": "", "digest": arrays_digest(arrays)}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    write_arrays(folder / MLX_WEIGHTS, _with_experts_turned(arrays), metadata)


def write_peft(adapter: Adapter, folder: Path, base_name: str, base_sha256: str = "", *, model_type: str) -> None:
    """Write what `peft.PeftModel.from_pretrained(base, folder)` reads; `base_name` is a hub id or folder for people.

    `base_sha256` is the base's fingerprint, which `base_of` reads. Raises AdapterError where transformers' names of the
    layers of a `model_type` are unknown, OSError if the disk does not take it.
    """
    experts = to_parameters(adapter, model_type)
    linears = linear_targets(adapter)
    modules = modules_of(linears, model_type)
    metadata = {EXPERTS: json.dumps(sorted(set(adapter.targets).difference(linears)))} if experts else {}
    if adapter.task is not None and adapter.task.task == "embed" and adapter.head is None:
        modules, metadata = _of_trunk(modules), {"trunk": TRUNK}
    if lost := left_out_by_peft(linears, model_type):
        logger.warning(
            "PEFT 0.21 itself does not load %d layers of this adapter of %s, such as %s; other programs may",
            *(len(lost), model_type, modules[lost[0]]),
        )
    _write_peft(adapter, folder, base_name, base_sha256, modules, metadata, experts)


def linear_targets(adapter: Adapter) -> list[str]:
    """The targets of `adapter` that are no experts."""
    return [target for target in adapter.targets if adapter.arrays[f"{target}.lora_a"].ndim == 2]


def _of_trunk(modules: Mapping[str, str]) -> dict[str, str]:
    """`modules` as the model without its head names them, which makes vectors. Raises AdapterError."""
    for module in modules.values():
        if not module.startswith(TRUNK):
            raise AdapterError(
                f"an adapter for vectors is not written in PEFT's format where it changes {module}, which is not below "
                f"{TRUNK.rstrip('.')}; leave the format out, formats=[mlx,fused]"
            )
    return {target: module.removeprefix(TRUNK) for target, module in modules.items()}


def write_exactly(adapter: Adapter, folder: Path, *, num_layers: int, base_name: str, base_sha256: str = "") -> None:
    """Write mlx-lm's format where it holds the adapter to the bit, else PEFT's with mlx-lm's names of the layers."""
    if adapter.ranks or adapter.alphas or adapter.head is not None:
        _write_peft(adapter, folder, base_name, base_sha256, {target: target for target in adapter.targets})
    else:
        write_mlx(adapter, folder, num_layers=num_layers)


def _write_peft(
    adapter: Adapter,
    folder: Path,
    base_name: str,
    base_sha256: str,
    modules: Mapping[str, str],
    more: Mapping[str, str] = MappingProxyType({}),
    experts: Sequence[ParameterLora] = (),
) -> None:
    """`modules` are the names of the targets in the file, `more` is further metadata, `experts` are other tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(peft_config(adapter, base_name, modules, experts), indent=2) + "\n")
    tensors: dict[str, mx.array] = {}
    for target, module in modules.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = adapter.arrays[f"{target}.lora_a"].swapaxes(-1, -2)
        tensors[f"base_model.model.{module}.lora_B.weight"] = adapter.arrays[f"{target}.lora_b"].swapaxes(-1, -2)
        if adapter.is_dora:
            tensors[f"base_model.model.{module}.lora_magnitude_vector"] = adapter.arrays[f"{target}.m"]
    tensors |= {name: tensor for parameter in experts for name, tensor in parameter.tensors.items()}
    if adapter.head is not None:
        tensors["base_model.model.score.weight"] = adapter.head
    metadata = {"format": "pt", "base_sha256": base_sha256, **more} | _metadata(adapter)
    write_arrays(folder / PEFT_WEIGHTS, tensors, metadata)


def read_adapter(
    folder: Path,
    targets: Mapping[str, Shape] | None = None,
    *,
    model_type: str = "",
    name: str | None = None,
    version: int | None = None,
) -> Adapter:
    """Read an adapter of either format. It may cover fewer targets than the base has.

    It must fit `targets` (those of the base), which PEFT may call as transformers does. `name` and
    `version` replace those in the file; a file from elsewhere becomes version 0 of `policy`. With a `modules.json`
    beside it, as sentence-transformers saves adapters, it makes vectors; with a head of several rows it classifies.
    Raises AdapterError.
    """
    config, arrays, metadata = _read_stored(folder)
    try:
        identity = {
            "name": name if name is not None else metadata.get("name", POLICY),
            "version": version if version is not None else int(metadata.get("version", "0")),
            "parent": int(metadata["parent"]) if metadata.get("parent") else None,
            "step": int(metadata.get("step", "0")),
        }
        task = from_json(metadata["task"]) if "task" in metadata else read_task_spec(folder)
        if task is not None and task.dense:
            raise ModelError(
                "modules.json has a Dense, and an adapter brings no such layers here; merge it into its base"
            )
        if isinstance(config, MlxConfig):
            adapter = _from_mlx(config, arrays, metadata, identity)
        else:
            experts, parameters, used = _experts_of(config, arrays, targets, model_type, metadata)
            linears = {name: array for name, array in arrays.items() if name not in used}
            adapter = _from_peft(
                config,
                _of_base(linears, config, targets, is_trunk="trunk" in metadata),
                model_type,
                identity,
                experts=(experts, parameters),
                is_ours="digest" in metadata,
                is_classifier=task is not None,
            )
        if targets is not None:
            check_fit(adapter, targets)
        task = _checked_task(task, adapter)
    except (AdapterError, ModelError, ValueError) as error:
        raise AdapterError(f"the adapter in {folder} cannot be used: {error}") from error
    if metadata.get("digest", adapter.digest) != adapter.digest:
        raise AdapterError(f"the adapter in {folder} is damaged: its arrays are not those that were saved")
    return adapter if task is None else replace(adapter, task=task)


def _experts_of(
    config: PeftConfig,
    arrays: Arrays,
    targets: Mapping[str, Shape] | None,
    model_type: str,
    metadata: Mapping[str, str],
) -> tuple[dict[str, mx.array], dict[str, str], set[str]]:
    """See `from_parameters`. Raises AdapterError where the base is not known, or its experts are no targets."""
    if not config.target_parameters:
        return {}, {}, set()
    experts = [target for target, shape in (targets or {}).items() if len(shape) == 3]
    if targets is None or not experts:
        raise AdapterError(
            f"target_parameters in {CONFIG} is {config.target_parameters}, and no experts are LoRA targets here; load "
            "the mixture that it was trained on, with experts in model.lora.targets, e.g. [all-linear,experts]"
        )
    names = parameter_names(experts, model_type)
    ranks = dict.fromkeys(names, config.r) | values_by_name(config.rank_pattern or {}, names)
    return from_parameters(
        arrays,
        config.target_parameters,
        ranks,
        targets,
        model_type,
        None if EXPERTS in metadata else config.peft_version or "",
        json.loads(metadata[EXPERTS]) if EXPERTS in metadata else None,
    )


def _of_base(tensors: Arrays, config: PeftConfig, targets: Mapping[str, Shape] | None, *, is_trunk: bool) -> Arrays:
    """`tensors` with the names of the whole model's layers: PEFT names those of an adapter for vectors as the trunk has
    them, without the head's class around it."""
    is_below = targets is not None and all(target.startswith(TRUNK) for target in targets)
    if config.task_type != "FEATURE_EXTRACTION" or not (is_trunk or is_below):
        return tensors
    prefix = "base_model.model."
    plain = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return {f"{prefix}{name if name.startswith(TRUNK) else TRUNK + name}": plain[name] for name in plain}


def _checked_task(task: TaskSpec | None, adapter: Adapter) -> TaskSpec | None:
    """The task of `adapter`, by its head where nothing else says it. Raises AdapterError if head and task differ."""
    head = adapter.arrays.get(HEAD)
    if task is None:
        return None if head is None else head_spec(head.shape[0])
    if (task.task != "embed") != (head is not None):
        raise AdapterError(f"its task is {task.task}, and it has {'no' if head is None else 'a'} head")
    if head is not None and len(task.labels) != head.shape[0]:
        raise AdapterError(f"its head has {head.shape[0]} rows, and its task {len(task.labels)} labels")
    return task


def base_of(folder: Path) -> str:
    """Fingerprint of the base that an adapter in PEFT's format was trained on, or an empty text. Raises
    AdapterError."""
    return _read_stored(folder)[2].get("base_sha256", "")


def write_arrays(path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, evaluating the arrays; equal arrays make equal bytes. Raises OSError."""
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


def _read_stored(folder: Path) -> tuple[MlxConfig | PeftConfig, Arrays, Mapping[str, str]]:
    """The config, the arrays and their metadata. Raises AdapterError."""
    try:
        config = parse_config(_text(folder / CONFIG))
        return config, *read_arrays(folder / (MLX_WEIGHTS if isinstance(config, MlxConfig) else PEFT_WEIGHTS))
    except FileNotFoundError as error:
        present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "no such folder"
        raise AdapterError(
            f"{folder} is no adapter: it needs {CONFIG} and {MLX_WEIGHTS} (mlx-lm) or {PEFT_WEIGHTS} (PEFT, saved with "
            f"safe_serialization=True); found: {present}"
        ) from error
    except (OSError, ValueError, AdapterError) as error:
        raise AdapterError(f"the adapter in {folder} cannot be read: {error}") from error


def _text(path: Path) -> str:
    if not path.is_file():  # a pipe would be waited for
        raise FileNotFoundError(f"{path} does not exist")
    return path.read_text()


def _metadata(adapter: Adapter) -> dict[str, str]:
    task = {} if adapter.task is None else {"task": to_json(adapter.task)}
    return task | {
        "name": adapter.name,
        "version": str(adapter.version),
        "parent": "" if adapter.parent is None else str(adapter.parent),
        "step": str(adapter.step),
        "alpha": repr(adapter.alpha),
        "rslora": "yes" if adapter.rslora else "",
        "digest": adapter.digest,
    }
