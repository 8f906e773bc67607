"""`POST /api/create`: a name of another model with a system message and parameters, or of uploaded files."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any, Literal

from pydantic import Field

from parallm.errors import InvalidRequest, ParallmError, UnknownModel
from parallm.model.gguf.parts import part_paths
from parallm.registry.records import Overlay
from parallm.server.catalog import model_names
from parallm.server.interfaces import Models
from parallm.server.ollama.blobs import ADAPTERS, MODELS, link_blobs, link_model
from parallm.server.ollama.cards import own_base
from parallm.server.ollama.modelfile import read_modelfile
from parallm.server.ollama.names import own_name
from parallm.server.ollama.options import read_options
from parallm.server.ollama.pull import Progress
from parallm.server.schemas import ModelName, Wire
from parallm.server.service import Service
from parallm.types import BASE

NEUTRAL = {
    "template": ("",),
    "quantize": ("",),
    "quantization": ("",),
    "renderer": ("",),
    "parser": ("",),
    "requires": ("",),
    "info": ({},),
    "path": ("",),
    "remote_host": ("",),
    "draft_files": ({},),
    "draft_quantize": ("",),
}
"""Fields that are not implemented, with the values that ask for nothing."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class GivenMessage(Wire):
    role: Literal["system", "user", "assistant"]
    content: str


class OllamaCreateBody(Wire):
    """`POST /api/create`."""

    model: ModelName | None = None
    name: ModelName | None = None
    """Older name of `model`."""
    source: str | None = Field(default=None, alias="from")
    """Name, hub id in the cache, or folder that the new name begins with."""
    files: dict[str, str] | None = None
    """Digests of uploaded files of a model, by their names in its folder."""
    adapters: dict[str, str] | None = None
    """Digests of uploaded files of an adapter in PEFT's format, by their names in its folder."""
    system: str | None = None
    license: str | list[str] | None = None
    parameters: dict[str, Any] | None = None
    """Defaults of `options`."""
    messages: list[GivenMessage] | None = None
    modelfile: str | None = None
    """The same fields as the text of a Modelfile, as older clients send them."""
    stream: bool = True


async def create(service: Service, models: Models, name: str, body: OllamaCreateBody) -> AsyncGenerator[Progress, None]:
    """Make a name, and yield what is done. Raises InvalidRequest, UnknownModel, ModelError, NotStored."""
    if own_name(service, name) in model_names(service):
        raise InvalidRequest(f"{name[:200]} is a name of this process; choose another", "model")
    body = _with_modelfile(body)
    yield Progress(status="reading model metadata")
    overlay = await _overlay(service, models, body)
    made: list[Path] = []
    try:
        if body.files:
            made.append(await asyncio.to_thread(link_blobs, models.folder, MODELS, body.files))
            source = str(made[-1] / _gguf_file(body.files))
        elif body.source:
            source = body.source
            if own_name(service, source) == BASE:
                base = Path(own_base(service).model.folder)
                made.append(await asyncio.to_thread(link_model, models.folder, base))
                source = str(made[-1] / base.name if base.is_file() else made[-1])
        else:
            raise InvalidRequest("neither 'from' or 'files' was specified", "from")
        if body.adapters:
            made.append(await asyncio.to_thread(link_blobs, models.folder, ADAPTERS, _checked_adapter(body.adapters)))
            overlay = replace(overlay, adapter=str(made[-1]))
        for digest in (*(body.files or {}).values(), *(body.adapters or {}).values()):
            yield Progress(status=f"using existing layer {digest}", digest=digest)
        if overlay.system:
            yield Progress(status="creating system layer")
        yield Progress(status="writing manifest")
        await models.create(name, source, None if overlay == Overlay() else overlay)
    except (ParallmError, asyncio.CancelledError, GeneratorExit):
        for path in made:
            await asyncio.shield(asyncio.to_thread(rmtree, path, True))
        raise
    yield Progress(status="success")


def _with_modelfile(body: OllamaCreateBody) -> OllamaCreateBody:
    if body.modelfile is None:
        return body
    fields = read_modelfile(body.modelfile)
    for name in ("template", "adapter"):
        if name in fields:
            raise InvalidRequest(f"{name.upper()} of a Modelfile is not supported here; leave it out", "modelfile")
    fields["source"] = fields.pop("from")
    if "messages" in fields:
        fields["messages"] = [GivenMessage(**message) for message in fields["messages"]]
    given = {name: getattr(body, name) for name in body.model_fields_set}
    return body.model_copy(update=fields | {name: value for name, value in given.items() if value is not None})


async def _overlay(service: Service, models: Models, body: OllamaCreateBody) -> Overlay:
    """Return what the new name adds: its own fields over those of the name that it begins with."""
    overlay = Overlay()
    if body.source:
        with suppress(UnknownModel, InvalidRequest):  # a hub id or a folder
            overlay = (await models.describe(body.source)).overlay or overlay
    fields: dict[str, Any] = {}
    if body.system is not None:
        fields["system"] = body.system
    if body.parameters is not None:
        read_options(body.parameters)
        fields["parameters"] = {**overlay.parameters, **body.parameters}
    if body.messages is not None:
        fields["messages"] = tuple(message.model_dump() for message in body.messages)
    if body.license is not None:
        fields["license"] = body.license if isinstance(body.license, str) else "\n".join(body.license)
    return replace(overlay, **fields)


def _gguf_file(files: dict[str, str]) -> str:
    """Return the name of a GGUF model's file, or of its first part; empty for a model that is a folder."""
    names = sorted(name for name in files if name.lower().endswith(".gguf"))
    if not names:
        return ""
    parts = [str(part) for part in part_paths(Path(names[0]))]
    if sorted(files) != parts:
        raise InvalidRequest(
            f"a model in GGUF is one file, or NAME-00001-of-0000N.gguf and all its other parts; files has {len(files)}",
            "files",
        )
    return names[0]


def _checked_adapter(files: dict[str, str]) -> dict[str, str]:
    if sorted(files) != sorted(ADAPTER_FILES):
        raise InvalidRequest(
            f"adapters should be the files {' and '.join(ADAPTER_FILES)} of PEFT; it has {', '.join(files)[:200]}",
            "adapters",
        )
    return files
