"""Path or hub id -> `SharedModel`, through mlx-lm, and every way in which a model folder can be broken.

`load_shared_model` runs on the device thread: the arrays are evaluated there. Code that a folder brings along runs with
the rights of the process, and only where `model.trust_remote_code` asks for it.
"""

import hashlib
import json
import logging
import re
import sys
import textwrap
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    StrictDataclassError,
)
from mlx.utils import tree_flatten
from mlx_lm.utils import _download, load_model, load_tokenizer

from parallm.device.own_transformers import own_transformers
from parallm.device.tf32 import choose_tf32
from parallm.errors import ModelError
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.encoders.load import load_encoder
from parallm.model.gguf.file import is_gguf
from parallm.model.gguf.folder import WEIGHTS, open_folder
from parallm.model.gguf.load import load_gguf
from parallm.model.headless import classes, overrides, tensor_names
from parallm.model.kernels.cuda import has_kernels, on_cuda
from parallm.model.lora.linear import LoraContext, merge_linears
from parallm.model.lora.targets import InputRecorder, install_lora
from parallm.model.patches.experts import install_products
from parallm.model.patches.forward import find_trunk, install_forward
from parallm.model.patches.recurrence import install_recurrence
from parallm.model.patches.rotary import install_rotary
from parallm.model.precision import is_in_range, may_be_float16
from parallm.model.quantized import arrange_quantized, cast, check_experts, choose_dtype, wants_tf32
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel, can_batch, keeps_states
from parallm.model.task_spec import ENCODERS, is_trunk, writes_text
from parallm.model.tensor_parallel import Ranks, cut_layers, sum_outputs

logger = logging.getLogger(__name__)

NANO = Path(__file__).parent / "nano"
UNIT_BYTES = 8 * 2**20
"""Weights that are read in one unit of work: some milliseconds of a CPU."""
FIRST_TOKENS = [[0, 1, 2, 3]]
"""One row for the first forwards of a model."""
FINGERPRINT_VALUES = 16  # of each array
MAX_REASON = 500  # characters of an error of the libraries, which may list every tensor
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
CHOSEN_EXPERTS_KEYS = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "moe_k"),
)
UNBOUNDED = sys.maxsize
"""Positions of a model whose config.json names no limit, such as a recurrent one."""
ROPE_WITHIN = ("default", "su", "longrope", "llama3")
"""Ways to scale rotary positions that max_position_embeddings already counts in."""


def load_shared_model(settings: ModelSettings, ranks: Ranks | None = None) -> SharedModel:
    """Load a model and its tokenizer for `share_model`, or this rank's part of the model if there are `ranks`.

    Raises as it does, and ModelError with the path and a way out.
    """
    return last(load_units(settings, ranks))


def load_units(
    settings: ModelSettings, ranks: Ranks | None = None, tokenizer: ChatTokenizer | None = None
) -> Iterator[SharedModel | None]:
    """`load_shared_model` in units of work, between which others may run; the last value is the model.

    `tokenizer`: that of `read_tokenizer`, if it was read before.
    """
    folder = find_folder(settings.path)
    base, config = load_base(folder, settings.path, trusted=settings.trust_remote_code)
    yield None
    tokenizer = tokenizer or _load_tokenizer(folder, config, trusted=settings.trust_remote_code)
    share = partial(share_units, config=config, tokenizer=tokenizer, settings=settings, ranks=ranks)
    if not has_text_head(folder, config):
        for model in share(base):
            yield model and replace(model, writes_text=False)
        return
    if settings.dtype == "auto" and may_be_float16(base, _model_type(config)):
        for model in share(base, computed=mx.float16):
            if model is None:
                yield None
            elif is_in_range(model):
                yield model
                return
        logger.info("%s computes in bfloat16: its hidden states need more than the range of float16", settings.path)
        base, config = load_base(folder, settings.path, trusted=settings.trust_remote_code)
    yield from share(base)


def share_model(
    base: nn.Module,
    config: Mapping[str, Any],
    tokenizer: ChatTokenizer,
    settings: ModelSettings,
    *,
    computed: mx.Dtype | None = None,
    ranks: Ranks | None = None,
) -> SharedModel:
    """Freeze and evaluate a model of mlx-lm, and make its linear layers LoRA targets. `config` is its config.json,
    `computed` the type that it computes in if not `settings.dtype`. With `ranks` only this rank's part is kept.

    Raises AdapterError for targets that the model does not have, ModelError for a way to keep quantized weights of a
    model that has none, and for a model that cannot compute on this device.
    """
    return last(share_units(base, config, tokenizer, settings, computed=computed, ranks=ranks))


def last(units: Iterator[SharedModel | None]) -> SharedModel:
    """The value of a load's last unit, after all of them."""
    model = deque(units, maxlen=1)[0]
    assert model is not None, "a load ends with the model"
    return model


def share_units(
    base: nn.Module,
    config: Mapping[str, Any],
    tokenizer: ChatTokenizer,
    settings: ModelSettings,
    *,
    computed: mx.Dtype | None = None,
    ranks: Ranks | None = None,
) -> Iterator[SharedModel | None]:
    """`share_model` in units of work; the last value is the model."""
    model_type = _model_type(config)
    dtype = choose_dtype(settings.dtype, base, config)
    check_experts(base, settings.quantized, dtype, model_type)
    cast(base, dtype)
    stored = stored_values(base)  # however it is kept here
    if computed is not None:
        dtype = computed
        cast(base, dtype)
    if on_cuda():
        choose_tf32(settings.path, wants_tf32(base, dtype))
    parallel = None
    if ranks is not None:
        parallel = cut_layers(base, config, ranks, settings.path)
        for name, own in tree_flatten(base.parameters()):  # so that one array at a time is whole
            mx.eval(own, stored[name].values)
    yield from _evaluated([array.values for array in stored.values()], _arrays(base))
    sha256 = fingerprint(stored)
    arrange_quantized(base, settings.quantized, dtype)
    _freeze(base)
    lora_context = LoraContext()
    install_forward(base, lambda: lora_context.is_served, lambda: lora_context.is_trained)
    install_recurrence(base)
    install_rotary(base)
    install_products(base, dtype)
    targets = install_lora(base, settings.lora, lora_context)
    if parallel is not None:
        targets = {name: parallel.whole_shape(name, shape) for name, shape in targets.items()}
        sum_outputs(base, parallel)
    yield from _evaluated(_arrays(base), _arrays(base))
    owner, name = find_trunk(base)
    text_config = config.get("text_config", config)
    model = SharedModel(
        name=settings.path,
        model_type=model_type,
        base=base,
        dtype=dtype,
        sha256=sha256,
        lora_context=lora_context,
        targets=targets,
        tokenizer=tokenizer,
        vocabulary_size=int(text_config.get("vocab_size") or base.args.vocab_size),
        max_context=max_positions(text_config),
        trunk_owner=owner,
        trunk_name=name,
        is_batch_invariant=can_batch(base, model_type),
        has_states=keeps_states(base, model_type),
        experts_per_token=experts_per_token(text_config),
        parallel=parallel,
    )
    yield None
    try:
        if not model.is_encoder:
            whole_TV = model.base(mx.array(FIRST_TOKENS), cache=model.make_cache())[0, ...]
            mx.eval(whole_TV)
            yield None
            model = _checked_split(model, whole_TV, model_type)
            yield None
        yield _with_joined(model)
    except (RuntimeError, ValueError) as error:  # MLX reports operations that a device lacks through these
        raise ModelError(
            f"model.path={settings.path}: {model_type} cannot compute a first token here: {_reason(error)}"
        ) from error


def _arrays(base: nn.Module) -> list[mx.array]:
    return [array for _, array in tree_flatten(base.parameters())]


def _evaluated(arrays: Sequence[mx.array], read: Sequence[mx.array]) -> Iterator[None]:
    """Evaluate arrays in units of about `UNIT_BYTES` of what each has to read."""
    unit: list[mx.array] = []
    num_bytes = 0
    for array, source in zip(arrays, read, strict=True):
        unit.append(array)
        num_bytes += source.nbytes
        if num_bytes >= UNIT_BYTES:
            mx.eval(unit)
            yield None
            unit, num_bytes = [], 0
    mx.eval(unit)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """What the fingerprint takes of an array of the base."""

    form: str
    """Shape and type."""
    values: mx.array
    """A few of its values, not evaluated."""


def stored_values(base: nn.Module) -> dict[str, StoredArray]:
    """What `fingerprint` takes, by the names of the arrays of a base. Evaluates nothing."""
    return {
        name: StoredArray(
            f"{array.shape} {array.dtype}",
            array.reshape(-1)[:: max(1, array.size // FINGERPRINT_VALUES)].astype(mx.float32),
        )
        for name, array in tree_flatten(base.parameters())
    }


def fingerprint(stored: Mapping[str, StoredArray]) -> str:
    """SHA-256 over names, shapes, types and a few values of a model's arrays; it tells one base from another."""
    mx.eval([array.values for array in stored.values()])
    digest = hashlib.sha256()
    for name, array in sorted(stored.items()):
        digest.update(f"{name} {array.form} {array.values.tolist()}".encode())
    return digest.hexdigest()


def check_local(path: str) -> None:
    """Raise ModelError for a `path` that is neither a hub id nor a folder with all files of a model. Fast."""
    folder = _local_folder(path)
    if folder is not None:
        _checked_config(folder, path)


def find_folder(path: str) -> Path:
    """The local folder of `path`: the embedded model, a folder, or a downloaded hub id. Raises ModelError."""
    folder = _local_folder(path)
    if folder is not None:
        return folder
    try:
        return Path(_download(path))
    except HFValidationError as error:
        raise ModelError(f"model.path={path}: neither a folder nor a hub id ({error})") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise ModelError(
            f"model.path={path}: no such folder here, and the Hugging Face hub did not give it ({_reason(error)}). "
            "Without network, download the model elsewhere and name its folder: model.path=/path/to/folder"
        ) from error


def _local_folder(path: str) -> Path | None:
    """None for what may be a hub id. Raises ModelError for a folder that is not there."""
    if path == "nano":
        return NANO
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if is_gguf(folder):
        return open_folder(folder)
    if folder.is_absolute() or path.startswith(".") or path.count("/") != 1:
        raise ModelError(
            f"model.path={path}: no such folder; give a folder with config.json and *.safetensors, or 'nano', or a "
            "file.gguf"
        )
    return None


def load_base(folder: Path, path: str, *, trusted: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """mlx-lm's model, its arrays not read yet, and its config. `trusted` lets the folder's own code run. Raises
    ModelError."""
    config = _checked_config(folder, path)
    own_class = config.get("model_file")  # which mlx-lm would run in place of one that it knows
    if own_class is not None and not trusted:
        raise ModelError(f"model.path={path}: {folder} {_way_out(own_class)}")
    try:
        if config.get("model_type") in ENCODERS:
            return load_encoder(folder, config)
        if (folder / WEIGHTS).exists():
            return load_gguf(folder, config)
        names = tensor_names(folder)
        if writes_text(config, names) and not is_trunk(names):
            return load_model(folder, lazy=True, trust_remote_code=trusted)
        base, config = load_model(folder, lazy=True, model_config=overrides(config, names), get_model_classes=classes)
        object.__delattr__(base, "sanitize")
        return base, config
    except (ValueError, RuntimeError, KeyError, TypeError, OSError, AttributeError) as error:
        # mlx-lm reports unknown architectures, missing tensors and broken files through all of these
        raise ModelError(f"model.path={path}: {folder} cannot be loaded: {_reason(error)}") from error
    except Exception as error:
        if own_class is None:
            raise
        raise ModelError(f"model.path={path}: {folder}/{own_class} fails: {_reason(error)}") from error


def has_text_head(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the model in a folder, whose files are whole, can write text."""
    return _model_type(config) not in ENCODERS and writes_text(config, tensor_names(folder))


def read_model_type(path: str) -> str:
    """The architecture of a model of mlx-lm, by its config.json alone. Raises ModelError."""
    return _model_type(_checked_config(find_folder(path), path))


def _way_out(name: str) -> str:
    """The end of an error about a folder whose code `name` does not run."""
    return (
        f"brings code of its own ({name}), which is not run; read it, then set model.trust_remote_code=true to run it "
        "with your rights"
    )


def _checked_config(folder: Path, path: str) -> dict[str, Any]:
    """The config.json of a folder. Raises ModelError unless all files of a model are there."""
    if not (folder / "config.json").is_file():
        files = sorted(file.name for file in folder.glob("*.gguf"))
        way_out = f"name one of its files, such as {folder / files[0]}" if files else "it must be a model folder"
        raise ModelError(f"model.path={path}: {folder} has no config.json; {way_out}")
    index = folder / "model.safetensors.index.json"
    try:
        config = dict(json.loads((folder / "config.json").read_text()))
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"model.path={path}: {folder} has a broken config.json or index: {error}") from error
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise ModelError(f"model.path={path}: {folder} is incomplete, without {missing}; copy or download it again")
    if not list(folder.glob("model*.safetensors")) and not (folder / WEIGHTS).exists():
        raise ModelError(f"model.path={path}: {folder} has no model*.safetensors; copy or download it again")
    return config


def read_tokenizer(settings: ModelSettings) -> ChatTokenizer:
    """The tokenizer of a model, for any thread. Raises ModelError."""
    folder = find_folder(settings.path)
    return _load_tokenizer(folder, _checked_config(folder, settings.path), trusted=settings.trust_remote_code)


def _load_tokenizer(folder: Path, config: dict[str, Any], *, trusted: bool) -> ChatTokenizer:
    code = {"trust_remote_code": trusted}  # transformers would ask on the terminal if nothing was said
    try:
        with own_transformers():
            return ChatTokenizer(load_tokenizer(folder, code, eos_token_ids=_end_tokens(config)))
    except (ValueError, OSError, KeyError, TypeError, StrictDataclassError) as error:
        if not trusted and "trust_remote_code" in str(error):
            raise ModelError(f"{folder}: the tokenizer {_way_out('auto_map in its configuration')}") from error
        reason = _reason(error)
        if not (folder / "tokenizer.json").is_file():  # what transformers says then is about packages
            reason = f"there is no tokenizer.json; copy or download it again ({reason})"
        raise ModelError(f"{folder}: the tokenizer cannot be loaded: {reason}") from error


def _end_tokens(config: Mapping[str, Any]) -> Any:
    """What ends a text; an encoder's text ends with a separator, or with nothing that its config names."""
    ends = config.get("eos_token_id")
    if ends is None and _model_type(config) in ENCODERS:
        return config.get("sep_token_id") or config["pad_token_id"]
    return ends


def _freeze(base: nn.Module) -> None:
    if not hasattr(base, "_no_grad"):  # recurrent_gemma's class never calls the constructor of nn.Module
        nn.Module.__init__(base)
    base.freeze()
    base.eval()


def _with_joined(model: SharedModel) -> SharedModel:
    """`model` with the groups of targets that a forward calls with one input; nothing is computed to find them."""
    recorder = InputRecorder()
    model.hidden(mx.array(FIRST_TOKENS), model.make_cache(), recorder)
    joined = recorder.groups()
    return replace(model, joined=joined, groups=merge_linears(model.base, joined) if has_kernels() else ())


def _checked_split(model: SharedModel, whole_TV: mx.array, model_type: str) -> SharedModel:
    """`model`, or the same without its split where trunk + head is not the whole forward to the bit.

    `whole_TV`: the logits of `FIRST_TOKENS`.
    """
    try:
        split_TV = model.head(model.hidden(mx.array(FIRST_TOKENS), model.make_cache(), None)[0, ...])
        if model.trunk_owner is not None and mx.array_equal(whole_TV, split_TV, equal_nan=True):
            return model
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        logger.debug("not split: %s", error)  # the trunk of this architecture is called in some other way
    logger.warning("%s: the head cannot be separated; log-probs will need whole logits", model_type)
    return replace(model, trunk_owner=None, trunk_name="")


def max_positions(config: Mapping[str, Any]) -> int:
    """Positions that the model can use: those it was trained for, times the factor of its rotary scaling."""
    positions = next((int(config[key]) for key in CONTEXT_KEYS if config.get(key)), UNBOUNDED)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if positions == UNBOUNDED or kind in ROPE_WITHIN:
        return positions
    trained = int(scaling.get("original_max_position_embeddings") or positions)
    return max(positions, int(trained * float(scaling.get("factor") or 1)))


def experts_per_token(config: Mapping[str, Any]) -> int:
    """Experts that a mixture computes for each token, the most of any layer; 1 for a model without experts."""
    chosen = next((config[key] for key in CHOSEN_EXPERTS_KEYS if config.get(key)), 1)
    return int(max(chosen) if isinstance(chosen, list) else chosen)


def _model_type(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type", "unknown"))


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    first, *others = re.split(r"(?<=[.!?:;])\s+", " ".join(str(error).split()))
    reason = first
    for sentence in others:
        if len(reason) + len(sentence) >= MAX_REASON:
            break
        reason += f" {sentence}"
    return textwrap.shorten(reason, 2 * MAX_REASON, placeholder=" ...") or type(error).__name__
