"""Ollama's routes that tell what is here: `/`, `/api/version`, `/api/tags`, `/api/ps`, `/api/show`.

Those of Ollama's cloud answer that there is none.
"""

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from parallm import __version__
from parallm.errors import InvalidRequest, Unavailable
from parallm.server.connection import json_response, received
from parallm.server.dashboard.routes_page import to_page, wants_page
from parallm.server.ollama.cards import (
    LoadedModels,
    ModelTags,
    all_cards,
    find_card,
    loaded_models,
    page_of,
    template_of,
    tensors_of,
)
from parallm.server.ollama.names import OllamaRoute, model_called
from parallm.server.ollama.schemas import object_of
from parallm.server.schemas import ModelName, Wire, checked
from parallm.server.service import Service

VERSION = "0.12.0"
"""Version of Ollama whose routes these are; clients choose what they send by it."""
CLOUD_PATHS: tuple[str, ...] = ("/api/push", "/api/me", "/api/signout")


class VersionAnswer(Wire):
    version: str
    parallm: str


class Cloud(Wire):
    disabled: bool
    source: str


class CloudStatus(Wire):
    cloud: Cloud


class ShowBody(Wire):
    model: ModelName | None = None
    name: ModelName | None = None
    """Older name of `model`."""
    verbose: bool = False
    """Also list the tensors of the model's files."""

    @property
    def asked(self) -> str:
        return asked_name(self.model, self.name)


SHOW_NEUTRAL = {"system": ("",), "template": ("",), "options": ({},)}


def asked_name(model: str | None, name: str | None) -> str:
    """Return the name of a body with `model` or its older form `name`. Raises InvalidRequest without any."""
    if (asked := model or name) is None:
        raise InvalidRequest("model is required", "model")
    return asked


def model_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=OllamaRoute)

    @router.get("/")
    @router.head("/")
    async def running(http: Request) -> Response:
        """Tell clients of Ollama that a server is here; lead browsers to the page."""
        if service.settings.dashboard and wants_page(http.headers):
            return to_page()
        return PlainTextResponse("Ollama is running")

    @router.get("/api/version")
    @router.head("/api/version")
    async def version() -> Response:
        """The version of Ollama that these routes are like, and this program's own."""
        return json_response(VersionAnswer(version=VERSION, parallm=__version__))

    @router.get("/api/tags")
    @router.head("/api/tags")
    async def tags() -> Response:
        """All names of models, loaded or not."""
        return json_response(ModelTags(models=[card.listed for card in await all_cards(service)]))

    @router.get("/api/ps")
    async def loaded() -> Response:
        """The models in memory, those that stay longest first."""
        cards = {card.name: card for card in await all_cards(service)}
        return json_response(LoadedModels(models=loaded_models(service, cards)))

    @router.post("/api/show")
    async def show(http: Request) -> Response:
        """What there is to say of a model: its template, parameters, capabilities and sizes."""
        body = await received(service, http, lambda text: checked(object_of(text), ShowBody, SHOW_NEUTRAL))
        with model_called(body.asked):
            card = await find_card(service, body.asked)
        page = page_of(card, await asyncio.to_thread(template_of, service, card))
        if body.verbose:
            page = page.model_copy(update={"tensors": await asyncio.to_thread(tensors_of, card.model)})
        return json_response(page)

    @router.get("/api/status")
    async def status() -> Response:
        """Whether models of Ollama's cloud are offered: never."""
        return json_response(CloudStatus(cloud=Cloud(disabled=True, source="config")))

    async def absent() -> Response:
        """Always an error: there is no registry or account of Ollama behind this server."""
        raise Unavailable("this server has no account at ollama.com, and publishes no models there")

    for path in CLOUD_PATHS:
        router.post(path)(absent)
    return router
