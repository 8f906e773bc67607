"""Models on this disk, as their small files and the headers of their tensors describe them. Loads no MLX.

A model is a folder as the Hugging Face hub has it, or a GGUF file.

`find_models` looks in configured folders and in the Hugging Face cache, and changes neither.
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE

from parallm.errors import ModelError
from parallm.model.gguf.facts import read_facts
from parallm.model.gguf.file import is_gguf
from parallm.model.gguf.parts import is_later_part, part_paths, stem_of
from parallm.model.task_spec import ENCODERS, read_task_spec, writes_text
from parallm.registry.records import MAX_SEGMENT, SEGMENT, Model

CONFIG = "config.json"
MAX_DEPTH = 3
"""Levels below a configured folder, as in `host/owner/model`."""
MAX_HEADER_BYTES = 100 * 2**20
MAX_FILE_BYTES = 16 * 2**20
"""Size of a small file of a model, such as tokenizer_config.json."""
REVISION = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}"
MAX_INTEGER = (1 << 63) - 1
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
TASKS = {"embed": "embedding", "score": "score", "classify": "classify"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A model and the name that it suggests."""

    source: str
    folder: Path
    name: str


def find_models(folders: tuple[str, ...]) -> Iterator[Found]:
    """Yield the models below `folders`, then those of the Hugging Face cache. A folder that is not there has none."""
    for folder in folders:
        root = Path(folder).expanduser().absolute()
        yield from (Found(str(path), path, _name_of(root, path)) for path in _below(root, MAX_DEPTH))
    for repository in sorted(Path(HF_HUB_CACHE).glob("models--*")):
        reference = repository / "refs" / "main"
        revision = _text(reference).strip()
        if not re.fullmatch(REVISION, revision):
            continue
        identity = repository.name.removeprefix("models--").replace("--", "/")
        snapshot = repository / "snapshots" / revision
        if is_model(snapshot):
            yield Found(identity, snapshot, identity)
        for path in sorted(snapshot.glob("*.gguf")):
            if not is_later_part(path):
                yield Found(f"{identity}/{path.name}", path, f"{identity}:{_segment(stem_of(path))}")


def is_model(path: Path) -> bool:
    if is_gguf(path):
        return path.is_file()
    return (path / CONFIG).is_file() and any(path.glob("model*.safetensors"))


def digest_of(folder: Path) -> str:
    """SHA-256 over names, sizes and times of the files of a model and over its config. Reads no weights."""
    digest = hashlib.sha256()
    for name, size, changed in sorted(_files(folder)):
        digest.update(f"{name} {size} {changed}\n".encode())
    if not is_gguf(folder):
        digest.update(_content(folder / CONFIG))
    return digest.hexdigest()


def describe(source: str, folder: Path, digest: str) -> Model:
    """Read what a model is. The number is 0. Raises ModelError for files that cannot be read."""
    try:
        model = describe_gguf(source, folder) if is_gguf(folder) else _describe_folder(source, folder, digest)
        _check_values(model)
        return model
    except ModelError:
        raise
    except Exception as error:  # config.json and headers of tensors are anybody's, and may be wrong in any way
        raise ModelError(f"{folder}: its files cannot be read: {error!r:.200}") from error


def _check_values(model: Model) -> None:
    """Raise ValueError for what the catalogue has no room for."""
    for name in ("parameters", "context", "hidden", "vocabulary", "num_bytes"):
        value = getattr(model, name)
        if value is not None and (not isinstance(value, int) or not 0 <= value <= MAX_INTEGER):
            raise ValueError(f"{name} is {value!r:.100}")
    for text in (model.architecture, model.license or ""):
        text.encode()


def _describe_folder(source: str, folder: Path, digest: str) -> Model:
    config = json.loads(_content(folder / CONFIG))
    tensors = tensor_headers(folder)
    files = list(_files(folder))
    text = config.get("text_config", config)
    return Model(
        id=0,
        source=source,
        folder=str(folder),
        format="safetensors",
        architecture=str(config.get("model_type", "unknown")),
        parameters=_num_parameters(tensors, _bits(config)),
        quantization=None if (bits := _bits(config)) is None else f"{bits}-bit",
        context=next((int(text[key]) for key in CONTEXT_KEYS if text.get(key)), None),
        hidden=text.get("hidden_size") or text.get("n_embd"),
        vocabulary=text.get("vocab_size"),
        num_bytes=sum(size for _, size, _ in files),
        digest=digest,
        capabilities=tuple(_capabilities(folder, config, frozenset(tensors))),
        license=_license(folder),
        modified_at=max(changed for *_, changed in files) / 1e9,
    )


def describe_gguf(source: str, path: Path) -> Model:
    """Read what a GGUF file is, from its header. The number is 0. Raises ModelError for one that cannot be loaded."""
    facts, files = read_facts(path), list(_files(path))
    capabilities = [] if facts.architecture in ENCODERS else ["completion", *_abilities(facts.chat_template or "")]
    return Model(
        id=0,
        source=source,
        folder=str(path),
        format="gguf",
        architecture=facts.architecture,
        parameters=facts.parameters,
        quantization=facts.quantization,
        context=facts.context,
        hidden=facts.hidden,
        vocabulary=facts.vocabulary,
        num_bytes=sum(size for _, size, _ in files),
        digest=digest_of(path),
        capabilities=(*capabilities, *(["embedding"] if facts.pooling else [])),
        license=facts.license,
        modified_at=max(changed for *_, changed in files) / 1e9,
    )


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if is_model(folder):
        yield folder
        return
    try:
        children = sorted(child for child in folder.iterdir() if not child.name.startswith("."))
    except OSError as error:
        logger.warning("models are not looked for in %s: %s", folder, error)
        return
    yield from (child for child in children if is_gguf(child) and child.is_file() and not is_later_part(child))
    for child in children if depth else ():
        if child.is_dir():
            yield from _below(child, depth - 1)


def _name_of(root: Path, path: Path) -> str:
    """The name of a model below a configured folder, with - for what names do not have."""
    relative = path.relative_to(root)
    parts = (relative.with_name(stem_of(path)) if is_gguf(path) else relative).parts or (root.name,)
    return "/".join(map(_segment, parts[-MAX_DEPTH:]))


def _segment(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:MAX_SEGMENT]
    return name if re.fullmatch(SEGMENT, name) else f"model{name}"[:MAX_SEGMENT]


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Names, sizes and times in nanoseconds of a model's files; those of the hub cache are links."""
    for path in part_paths(folder) if is_gguf(folder) else folder.iterdir():
        if path.is_file():
            found = path.stat()
            yield path.name, found.st_size, found.st_mtime_ns


def tensor_headers(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The headers of the tensors by name, as safetensors writes them."""
    tensors: dict[str, Mapping[str, Any]] = {}
    for path in folder.glob("model*.safetensors"):
        if not path.is_file():  # opening a pipe would wait for somebody who writes into it
            raise ValueError(f"{path.name} is no file")
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > min(MAX_HEADER_BYTES, path.stat().st_size):
                raise ValueError(f"{path.name} has no header of safetensors")
            tensors |= json.loads(file.read(size))
    tensors.pop("__metadata__", None)
    return tensors


def _num_parameters(tensors: Mapping[str, Mapping[str, Any]], bits: int | None) -> int:
    """Weights of a model; of quantized ones, which are packed into 32 bits, without their scales and biases."""
    total = 0
    for name, tensor in tensors.items():
        is_packed = bits is not None and tensor["dtype"] == "U32"
        if name.endswith((".scales", ".biases")) and f"{name.rpartition('.')[0]}.weight" in tensors:
            continue
        total += math.prod(tensor["shape"]) * 32 // bits if is_packed and bits else math.prod(tensor["shape"])
    return total


def _bits(config: Mapping[str, Any]) -> int | None:
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    bits = quantization.get("bits") if isinstance(quantization, Mapping) else None
    return bits if isinstance(bits, int) and bits > 0 else None


def _capabilities(folder: Path, config: Mapping[str, Any], names: frozenset[str]) -> Iterator[str]:
    if config.get("model_type") not in ENCODERS and writes_text(config, names):
        yield "completion"
        yield from _abilities(chat_template(folder))
    try:
        spec = read_task_spec(folder)
    except ModelError:
        return  # a load says why
    if spec is not None:
        yield TASKS[spec.task]


def _abilities(template: str) -> Iterator[str]:
    if re.search(r"\btools\b", template):
        yield "tools"
    if re.search(r"<think>|\benable_thinking\b|\breasoning_content\b", template):
        yield "thinking"


def chat_template(folder: Path) -> str:
    """The chat template of a folder or a GGUF file; several ones as JSON."""
    if is_gguf(folder):
        return read_facts(folder).chat_template or ""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _text(file)
    try:
        template = json.loads(_text(folder / "tokenizer_config.json")).get("chat_template", "")
    except (ValueError, AttributeError):
        return ""
    return template if isinstance(template, str) else json.dumps(template)


def _license(folder: Path) -> str | None:
    match = re.search(r"^license:\s*([^\s#]+)", _text(folder / "README.md")[:4096], re.MULTILINE)
    return None if match is None else match[1]


def _content(file: Path) -> bytes:
    """Return a small file. Raises OSError for what is none, such as a pipe, which nobody may write into."""
    if not file.is_file() or file.stat().st_size > MAX_FILE_BYTES:
        raise OSError(f"{file} is no file of at most {MAX_FILE_BYTES} bytes")
    return file.read_bytes()


def _text(file: Path) -> str:
    try:
        return _content(file).decode(errors="replace")
    except OSError:
        return ""
