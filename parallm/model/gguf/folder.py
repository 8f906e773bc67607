"""A GGUF file as a folder of Hugging Face's files, which its metadata say: config.json, the tokenizer's, modules.json.

The folder lies in the user's cache and is named by its content, so that it is written once; the weights are a link to
the file itself. Whatever reads model folders reads this one. Imports no MLX.
"""

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from parallm.device.user_cache import user_cache
from parallm.errors import ModelError
from parallm.model.gguf.config import POOLING, read_config
from parallm.model.gguf.file import GgufFile
from parallm.model.gguf.names import find_sources
from parallm.model.gguf.parts import read_parts
from parallm.model.gguf.tokenizer import end_tokens, read_tokenizer

WEIGHTS = "model.gguf"
"""The link to the file."""
SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"} | {
    "penalty_repeat": "repetition_penalty"
}
"""Names in generation_config.json of what a file recommends for sampling, by `general.sampling.*`."""


def open_folder(path: Path) -> Path:
    """The folder of a GGUF file, written if need be. Raises ModelError for a file that is broken or not known."""
    try:
        found = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    # not what links lead to: in the hub's cache that has no name, and parts are found by their names
    return _open_folder(path.absolute(), found.st_size, found.st_mtime_ns)


def weights_of(folder: Path) -> Path:
    """The GGUF file that a folder was made of."""
    return (folder / WEIGHTS).readlink()


@lru_cache(maxsize=8)
def _open_folder(path: Path, *_: int) -> Path:
    contents = describe(read_parts(path))
    digest = hashlib.sha256(json.dumps([str(path), sorted(contents.items())]).encode()).hexdigest()
    above = user_cache("gguf")
    folder = (above or _temporary()) / digest[:32]
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        for name, content in contents.items():
            place = unfinished / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(content, encoding="utf-8")
        (unfinished / WEIGHTS).symlink_to(path)
        unfinished.rename(folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not folder.is_dir():  # another process has not been faster
            raise ModelError(
                f"{path}: its tokenizer and configuration cannot be written to {folder.parent}: {error}; free some "
                "space, or name another place with XDG_CACHE_HOME"
            ) from error
    return folder


def describe(file: GgufFile) -> dict[str, str]:
    """Contents of a folder's files, by their names, of a file whose tensors are all known. Raises ModelError."""
    find = read_config(file) | {"eos_token_id": end_tokens(file)}
    find_sources(file)
    contents = {"config.json": _json(find), **read_tokenizer(file, file.path.with_name("tokenizer.json"))}
    sampling = {f"general.sampling.{key}": name for key, name in SAMPLING.items()}
    if values := {name: file.number(key) for key, name in sampling.items() if key in file.metadata}:
        contents["generation_config.json"] = _json(values)
    return contents | _pooling(file)


def _pooling(file: GgufFile) -> dict[str, str]:
    """Files of sentence-transformers for a model that makes vectors."""
    key = f"{file.architecture}.pooling_type"
    number = file.integer(key, 0, least=0)
    if number not in POOLING:
        raise file.error(f"{key} is {number}, and a model that ranks texts is not known here")
    if (pooling := POOLING[number]) is None:
        return {}
    kinds = ("Transformer", "Pooling", "Normalize")
    places = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": index, "name": str(index), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, place) in enumerate(zip(kinds, places, strict=True))
    ]
    width = file.integer(f"{file.architecture}.embedding_length")
    settings = {"word_embedding_dimension": width, "pooling_mode": pooling}
    return {"modules.json": json.dumps(modules, indent=2), "1_Pooling/config.json": _json(settings)}


@lru_cache(maxsize=1)
def _temporary() -> Path:
    """A folder for a user without a cache, gone with this process."""
    folder = Path(tempfile.mkdtemp(prefix="parallm-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"
