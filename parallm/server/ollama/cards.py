"""What Ollama's lists and pages say of a model: its details, size, digest and capabilities.

A name is one of this process (the base, policies, adapters and their versions) or one of the catalogue.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from parallm.errors import ModelError, Unavailable, UnknownModel
from parallm.model.gguf.file import is_gguf
from parallm.model.gguf.parts import read_parts
from parallm.registry.discovery import TASKS, chat_template, tensor_headers
from parallm.registry.records import Model, Named, Overlay
from parallm.server.catalog import card_of, model_names
from parallm.server.ollama.modelfile import parameter_lines, write_modelfile
from parallm.server.ollama.names import own_name, tagged
from parallm.server.ollama.schemas import timestamp
from parallm.server.schemas import Wire
from parallm.server.service import OwnBase, Service
from parallm.types import BASE, LATEST

NEVER = "9999-01-01T00:00:00+00:00"
"""Time at which what stays loaded expires; every reader of dates knows it."""
IN_MEMORY = ("ready", "draining")
"""States of models that are shown as loaded."""
UNKNOWN = "unknown"
BILLION = 10**9
SUFFIXES = ((10**12, "T"), (BILLION, "B"), (10**6, "M"), (10**3, "K"))
RENAMED = {"repetition_penalty": "repeat_penalty"}
"""Ollama's names of sampling defaults, where they differ."""


class Details(Wire):
    parent_model: str
    """The name that this one was made from, of those that this process says it of."""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(Wire):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    capabilities: list[str]


class ModelTags(Wire):
    """`GET /api/tags`."""

    models: list[ListedModel]


class LoadedModel(Wire):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class LoadedModels(Wire):
    """`GET /api/ps`."""

    models: list[LoadedModel]


class Tensor(Wire):
    name: str
    type: str
    shape: list[int]


class ModelPage(Wire):
    """`POST /api/show`."""

    license: str | None = None
    modelfile: str
    parameters: str
    template: str
    system: str | None = None
    details: Details
    messages: list[dict[str, Any]] = Field(default_factory=list)
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    tensors: list[Tensor] | None = None
    """Tensors of the model's files, with `verbose`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A name with what there is to say of it."""

    name: str
    """The name with its tag."""
    model: Model
    context: int
    overlay: Overlay
    num_bytes: int
    """Size of its files, its adapter included."""
    digest: str
    capabilities: Sequence[str]
    parent: str = ""
    is_own: bool = False
    """Whether this process was started with its base."""

    @property
    def details(self) -> Details:
        model = self.model
        return Details(
            parent_model=self.parent,
            format=model.format,
            family=model.architecture,
            families=[model.architecture],
            parameter_size=UNKNOWN if model.parameters is None else short_number(model.parameters),
            quantization_level=model.quantization or UNKNOWN,
        )

    @property
    def modified_at(self) -> str:
        return timestamp(self.model.modified_at)

    @property
    def listed(self) -> ListedModel:
        return ListedModel(
            name=self.name,
            model=self.name,
            modified_at=self.modified_at,
            size=self.num_bytes,
            digest=self.digest,
            details=self.details,
            capabilities=list(self.capabilities),
        )


async def find_card(service: Service, name: str) -> Card:
    """Return the card of a name. Raises UnknownModel, InvalidRequest for what is no name."""
    own = own_name(service, name)
    if own in model_names(service):
        return own_card(service, own)
    if service.models is None:
        raise UnknownModel(name)
    return named_card(await service.models.describe(name))


async def all_cards(service: Service) -> list[Card]:
    """Return the cards of all names, those of this process first, then the newest first."""
    cards = [own_card(service, name) for name in model_names(service)]
    named = () if service.models is None else await service.models.names()
    return cards + sorted(map(named_card, named), key=lambda card: card.model.modified_at, reverse=True)


def own_card(service: Service, name: str) -> Card:
    """Return the card of a name of this process."""
    base = own_base(service)
    adapter = card_of(name, service.catalog())
    capabilities = list(base.model.capabilities)
    digest, num_bytes = base.model.digest, base.model.num_bytes
    if adapter is not None:
        digest = hashlib.sha256(f"{digest} {adapter.digest}".encode()).hexdigest()
        num_bytes += adapter.num_bytes
        capabilities = capabilities if adapter.task is None else []
    if (task := _task_of(service, name)) is not None and task not in capabilities:
        capabilities.append(task)
    defaults = service.sampling_defaults
    return Card(
        name=tagged(name),
        model=base.model,
        context=service.engine.max_context,
        overlay=Overlay(parameters={RENAMED.get(key, key): value for key, value in defaults.items()}),
        num_bytes=num_bytes,
        digest=digest,
        capabilities=capabilities,
        parent="" if adapter is None else tagged(BASE),
        is_own=True,
    )


def named_card(named: Named) -> Card:
    """Return the card of a name of the catalogue."""
    model, overlay = named.model, named.overlay or Overlay()
    digest = model.digest
    if named.overlay is not None:
        digest = hashlib.sha256(f"{digest} {json.dumps(asdict(overlay), sort_keys=True)}".encode()).hexdigest()
    return Card(
        name=named.name,
        model=model,
        context=model.context or 0,
        overlay=overlay,
        num_bytes=model.num_bytes,
        digest=digest,
        capabilities=model.capabilities,
        parent="" if named.overlay is None else model.source,
    )


def own_base(service: Service) -> OwnBase:
    assert service.base is not None, "the runtime describes the base where server.ollama is on"
    return service.base


def loaded_models(service: Service, cards: Mapping[str, Card]) -> list[LoadedModel]:
    """Return what is in memory: the names of this process without their versions, and the catalogue's.

    `cards` are those of the names in memory.
    """
    base = own_base(service)
    found = [
        _loaded(cards[name], cards[name].num_bytes - base.model.num_bytes + base.num_bytes, NEVER, base)
        for name in map(tagged, model_names(service))
        if name.endswith(f":{LATEST}")
    ]
    for loaded in () if service.models is None else service.models.loaded():
        if loaded.name in cards and loaded.state in IN_MEMORY:
            expires = NEVER if loaded.expires_at is None else timestamp(loaded.expires_at)
            found.append(_loaded(cards[loaded.name], loaded.num_bytes, expires, base))
    return sorted(found, key=lambda model: model.expires_at, reverse=True)


def template_of(service: Service, card: Card) -> str:
    """Return the chat template of a model, which may be read from its files."""
    if card.is_own:
        return service.tokenizer.template_source
    return card.overlay.template or chat_template(Path(card.model.folder))


def page_of(card: Card, template: str) -> ModelPage:
    """Return what `POST /api/show` answers."""
    architecture = card.model.architecture
    facts: dict[str, object] = {
        "general.architecture": architecture,
        "general.basename": card.name.rpartition(":")[0],
        "general.parameter_count": card.model.parameters,
        f"{architecture}.context_length": card.context or None,
        f"{architecture}.embedding_length": card.model.hidden,
        f"{architecture}.vocab_size": card.model.vocabulary,
    }
    overlay = card.overlay
    shown: dict[str, Any] = {}
    if text := overlay.license or card.model.license:
        shown["license"] = text
    if overlay.system:
        shown["system"] = overlay.system
    if overlay.messages:
        shown["messages"] = [dict(message) for message in overlay.messages]
    return ModelPage(
        modelfile=write_modelfile(card.name, card.parent or card.model.source, overlay),
        parameters="\n".join(f"{name:<30} {value}" for name, value in parameter_lines(overlay.parameters)),
        template=template,
        details=card.details,
        model_info={name: value for name, value in facts.items() if value is not None},
        capabilities=list(card.capabilities),
        modified_at=card.modified_at,
        **shown,
    )


def tensors_of(model: Model) -> list[Tensor]:
    """Return the tensors of a model's files. Raises Unavailable for files that cannot be read so."""
    path = Path(model.folder)
    try:
        if is_gguf(path):
            found = read_parts(path).tensors.items()
            return [Tensor(name=name, type=tensor.kind.name, shape=list(tensor.shape)) for name, tensor in found]
        headers = tensor_headers(path)
    except (OSError, ValueError, ModelError) as error:
        raise Unavailable(f"the tensors of {model.source} cannot be listed: {error}") from error
    return [Tensor(name=name, type=header["dtype"], shape=header["shape"]) for name, header in headers.items()]


def short_number(number: int) -> str:
    """Return a number as Ollama writes numbers of parameters: 8.0B, 596.05M."""
    for size, suffix in SUFFIXES:
        if number >= size:
            return f"{number / size:.1f}{suffix}" if size >= BILLION else f"{number / size:.2f}{suffix}"
    return str(number)


def _loaded(card: Card, num_bytes: int, expires_at: str, base: OwnBase) -> LoadedModel:
    return LoadedModel(
        name=card.name,
        model=card.name,
        size=num_bytes,
        digest=card.digest,
        details=card.details,
        expires_at=expires_at,
        size_vram=num_bytes if base.is_on_accelerator else 0,
        context_length=card.context,
    )


def _task_of(service: Service, name: str) -> str | None:
    """Return what a name makes of texts beside other text."""
    if service.encoder is None:
        return None
    try:
        return TASKS[service.encoder.spec(name).task]
    except (UnknownModel, Unavailable):
        return None
