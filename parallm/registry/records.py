"""What the catalogue and the pool say of models, and how names are written."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from parallm.errors import InvalidRequest
from parallm.types import LATEST

MAX_SEGMENT = 96
SEGMENT = rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_SEGMENT - 1}}}"
NAME = re.compile(rf"((?:{SEGMENT}/){{0,2}}{SEGMENT})(?::({SEGMENT}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model on this disk, as its files describe it."""

    id: int
    source: str
    """Hub id, or the path."""
    folder: str
    """A folder, or a file of format `gguf`."""
    format: Literal["safetensors", "gguf"]
    architecture: str
    """`model_type` of its config.json."""
    parameters: int | None
    quantization: str | None
    """Such as `4-bit`; None: none."""
    context: int | None
    """Positions."""
    hidden: int | None
    vocabulary: int | None
    num_bytes: int
    """Size of its files."""
    digest: str
    """SHA-256 of names, sizes and times of its files and of its config; not of the weights."""
    capabilities: tuple[str, ...]
    """Some of `completion`, `tools`, `thinking`, `embedding`, `score`, `classify`."""
    license: str | None
    modified_at: float
    """Unix seconds."""
    is_missing: bool = False
    """Whether the last scan did not find it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """What a name adds to a model."""

    system: str | None = None
    """System message of chats that bring none."""
    template: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of requests, by Ollama's names."""
    messages: tuple[Mapping[str, str], ...] = ()
    """Messages before those of every chat."""
    license: str | None = None
    adapter: str | None = None
    """Folder of an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A name of the catalogue."""

    name: str
    """The name with its tag: `qwen3:latest`."""
    model: Model
    overlay: Overlay | None = None
    is_pinned: bool = False
    """Whether the model leaves memory by an operator's request alone."""
    created_at: float = 0.0
    """Unix seconds."""

    @property
    def key(self) -> str:
        """What is loaded for it: names with the same key share one copy in memory."""
        adapter = None if self.overlay is None else self.overlay.adapter
        return self.model.folder if adapter is None else f"{self.model.folder}\0{adapter}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model in memory, on its way there or out of it."""

    name: str
    """The first name that asked for it."""
    names: tuple[str, ...]
    state: str
    num_bytes: int
    """What it counts for in the budget."""
    expires_at: float | None
    """Unix seconds; None: it stays until its memory is needed, or it answers just now."""
    is_pinned: bool
    num_leases: int
    """Requests that it answers now."""


def normal_name(text: str) -> str:
    """Return a name with its tag: `qwen3` is `qwen3:latest`. Raises InvalidRequest for what is no name."""
    match = NAME.fullmatch(text)
    if match is None:
        raise InvalidRequest(
            f"{text[:200]!r} is no name of a model; it has up to three parts of letters, digits and ._- between "
            "slashes, and perhaps a tag: qwen/qwen3:8b",
            "model",
        )
    return f"{match[1]}:{match[2] or LATEST}"
