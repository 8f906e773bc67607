"""`/v1/models`: every name that `model` may be."""

from typing import Literal

from fastapi import APIRouter
from starlette.responses import Response

from parallm.errors import UnknownModel
from parallm.model.adapters.names import versioned
from parallm.server.catalog import card_of
from parallm.server.connection import json_response
from parallm.server.schemas import Wire
from parallm.server.service import Service
from parallm.types import BASE, AdapterCard


class ModelEntry(Wire):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    policy_version: int


class ModelList(Wire):
    object: Literal["list"]
    data: list[ModelEntry]


def model_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    @router.get("/models")
    async def models() -> Response:
        """Every name that `model` may be: the base, adapters, their versions and aliases."""
        return json_response(_model_list(service))

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One of these names, or another that `model` may be."""
        return json_response(_model_entry(name, service))

    return router


def _model_list(service: Service) -> ModelList:
    """List the policies, the base, other adapters (the version that is served), aliases, and every version.

    Policies come first because many clients take the first model of the list.
    """
    cards = service.catalog()
    names = {card.name for card in cards} | {alias for card in cards for alias in card.aliases}
    names -= set(service.policies)
    versions = [versioned(card.name, card.version) for card in cards]
    order = (*service.policies, BASE, *sorted(names), *versions)
    return ModelList(object="list", data=[_entry(name, card_of(name, cards), service) for name in order])


def _model_entry(name: str, service: Service) -> ModelEntry:
    """Return the entry of a name of the list, or of another way to say it. Raises UnknownModel."""
    entries = {entry.id: entry for entry in _model_list(service).data}
    if name in entries:
        return entries[name]
    card = card_of(name, service.catalog())
    if card is None:
        raise UnknownModel(f"no model {name[:200]!r}; there are {sorted(entries)}")
    return _entry(name, card, service)


def _entry(name: str, card: AdapterCard | None, service: Service) -> ModelEntry:
    """Return the entry of a name; one without a card is the base, or a policy before its first version."""
    parent = BASE if card is None or not card.parent else versioned(card.name, card.parent)
    return ModelEntry(
        id=name,
        object="model",
        created=service.started,
        owned_by="parallm",
        root=service.base_name,
        parent=None if name == BASE else parent,
        max_model_len=service.engine.max_context,
        policy_version=0 if card is None else card.version,
    )
