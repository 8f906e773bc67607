"""The wiring of `parallm.export`: writes an adapter for mlx-lm and PEFT, and a fused model."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer
from tokenizers.processors import Sequence, TemplateProcessing

from parallm.checkpoint.adapter_paths import find_adapter
from parallm.config.schema import ExportConfig
from parallm.device.blas import BlasReport
from parallm.errors import CheckpointError, ConfigError, ModelError
from parallm.metrics.formatting import short_path
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.expert_files import to_parameters
from parallm.model.adapters.files import base_of, linear_targets, read_adapter, write_mlx, write_peft
from parallm.model.adapters.fuse import Quantization, fuse, model_bytes, write_model
from parallm.model.adapters.module_names import modules_of
from parallm.model.adapters.reward_head import refuse_head
from parallm.model.gguf.writer import write_gguf
from parallm.model.load import check_local, find_folder, load_base, read_model_type
from parallm.model.task_spec import write_task_spec
from parallm.types import TaskSpec

FOLDERS = {"mlx": "adapter", "peft": "adapter_peft", "fused": "fused", "gguf": "fused.gguf"}
GGUF_BITS = 8
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")
"""Files that sentence-transformers wants beside an adapter, too."""
SPARE_BYTES = 32 << 20
"""Bytes of tokenizer, config and headers."""
PROBE = "a"


def run_export(config: ExportConfig, folder: Path, _: BlasReport) -> int:
    """Write the folders and print where they are. Returns the exit code; raises ParallmError."""
    output = _output(config, folder)
    check_local(config.model.path)
    if config.model.adapter is None:
        raise ConfigError(
            "model.adapter: must be given; name the folder of a run, a checkpoint or an adapter, or FOLDER@VERSION"
        )
    named = find_adapter(config.model.adapter)
    adapter = read_adapter(named, model_type=read_model_type(config.model.path))
    temporary = output / f".tmp-export-{os.getpid()}"
    try:
        output.mkdir(parents=True, exist_ok=True)
        written = _write(config, adapter, named, temporary)
        for name in written:
            (temporary / name).rename(output / name)
    except OSError as error:
        raise CheckpointError(
            f"{output} could not be written: {error}; nothing is left there, choose another place with output=FOLDER"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if output.is_dir() and not any(output.iterdir()):
            output.rmdir()
    sys.stdout.write(f"version {adapter.version} of step {adapter.step}\n")
    for name, description in written.items():
        sys.stdout.write(f"{description}\n  {short_path(output / name)}\n")
    return 0


def _output(config: ExportConfig, folder: Path) -> Path:
    """Return the folder to write to. Raises ConfigError if it is not empty, and for contradicting settings."""
    bits, formats = config.quantize.bits, list(config.formats)
    if bits is not None and not {"fused", "gguf"} & set(formats):
        raise ConfigError(
            f"quantize.bits={bits} is for the fused model, which formats={formats} leaves out; add fused to formats"
        )
    if bits not in (None, GGUF_BITS) and "gguf" in formats:
        raise ConfigError(f"quantize.bits={bits}: a GGUF file is written with 8 bits (Q8_0), or without quantize.bits")
    if config.output is None:
        return folder
    output = Path(config.output).expanduser()
    if output.is_dir() and not any(output.iterdir()):
        return output
    if output.exists():
        raise ConfigError(f"output={output} exists already; name a folder that does not, or remove it first")
    return output


def _write(config: ExportConfig, adapter: Adapter, named: Path, folder: Path) -> dict[str, str]:
    """Write every format into `folder`. Return descriptions by the names of its folders. Raises OSError."""
    if config.formats != ("peft",):
        refuse_head(adapter, f"model.adapter={config.model.adapter}", "export it with formats=[peft] alone")
    source = find_folder(config.model.path)
    base, base_config = load_base(source, config.model.path, trusted=config.model.trust_remote_code)
    num_layers, model_type = len(base.layers), read_model_type(config.model.path)
    if "peft" in config.formats:
        modules_of(linear_targets(adapter), model_type)
        to_parameters(adapter, model_type)  # both refuse what PEFT could not load before anything is written
    if "gguf" in config.formats and adapter.task is not None:
        raise ConfigError("formats: what the adapter makes of texts cannot be said in a GGUF file; leave gguf out")
    bits, group_size = config.quantize.bits, config.quantize.group_size
    quantization = None if bits is None else Quantization(bits=bits, group_size=group_size)
    dtype = None if config.model.dtype == "auto" else getattr(mx, config.model.dtype)
    fused_config = fuse(base, base_config, adapter, dtype, quantization)  # checks the fit; evaluates nothing
    fused_bytes = model_bytes(base)
    num_fused = len({"fused", "gguf"} & set(config.formats))
    _check_space(folder.parent, num_fused * fused_bytes + 2 * adapter.nbytes)
    task, descriptions = adapter.task, dict[str, str]()
    if "mlx" in config.formats:
        write_mlx(adapter, folder / FOLDERS["mlx"], num_layers=num_layers)
        descriptions[FOLDERS["mlx"]] = "adapter for mlx-lm, --adapter-path"
    if "peft" in config.formats:
        write_peft(adapter, folder / FOLDERS["peft"], config.model.path, base_of(named), model_type=model_type)
        if task is not None:
            for path in (path for pattern in TOKENIZER_FILES for path in source.glob(pattern)):
                shutil.copyfile(path, folder / FOLDERS["peft"] / path.name)
            _write_task(task, folder / FOLDERS["peft"], base_config)
        descriptions[FOLDERS["peft"]] = "adapter for PEFT, PeftModel.from_pretrained"
    if "fused" in config.formats:
        write_model(base, fused_config, source, folder / FOLDERS["fused"])
        if task is not None:
            _write_task(task, folder / FOLDERS["fused"], base_config)
        quantized = "" if bits is None else f", {bits} bits"
        descriptions[FOLDERS["fused"]] = f"whole model, {fused_bytes / 1e6:,.1f} MB{quantized}"
    if "gguf" in config.formats:
        base, base_config = load_base(source, config.model.path, trusted=config.model.trust_remote_code)
        fused_config = fuse(base, base_config, adapter, dtype, None)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FOLDERS["gguf"]
        name = Path(config.model.path).stem
        num_bytes = write_gguf(base, fused_config, source, path, name=name, is_q8_0=bits is not None)
        descriptions[path.name] = f"whole model as GGUF, {num_bytes / 1e6:,.1f} MB"
    return descriptions


def _write_task(task: TaskSpec, folder: Path, base_config: Mapping[str, Any]) -> None:
    """Say in the files of `folder`, its tokenizer among them, what other programs should make of texts."""
    write_task_spec(task, folder, base_config)
    if task.end_token is not None:
        end_texts_with(folder, task.end_token)


def end_texts_with(folder: Path, token: int) -> None:
    """Let the tokenizer.json in `folder` end each text with the token of this id, after what it adds already.

    Raises ModelError where there is none, and for a tokenizer that cannot be changed so.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"its vectors are those of texts that end with the token {token}, which the tokenizer does not add, and "
            "the base has no tokenizer.json that could; export with formats=[mlx]"
        )
    tokenizer = Tokenizer.from_file(str(file))
    name, expected = tokenizer.id_to_token(token), [*tokenizer.encode(PROBE).ids, token]
    end = TemplateProcessing(single=["$A", name], pair=["$A", "$B:1", name], special_tokens=[(name, token)])
    own = tokenizer.post_processor
    tokenizer.post_processor = end if own is None else Sequence([own, end])
    tokenizer.save(str(file))
    found = Tokenizer.from_file(str(file)).encode(PROBE).ids
    if found != expected:
        raise ModelError(f"its tokenizer would read {PROBE!r} as {found}, not as {expected}; export with formats=[mlx]")


def _check_space(folder: Path, num_bytes: int) -> None:
    free, needed = shutil.disk_usage(folder).free, num_bytes + SPARE_BYTES
    if free < needed:
        raise CheckpointError(
            f"{folder} has {free:,} bytes free, about {needed:,} are needed; free some space or choose another place "
            "with output=FOLDER"
        )
