"""`POST /api/generate` and `POST /api/chat`: lines of JSON, or one object without `stream`."""

from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import Unavailable, UnknownModel
from parallm.server.catalog import model_names
from parallm.server.connection import json_response, received
from parallm.server.generation import ResponseContext, respond
from parallm.server.ollama.answers import LOAD_SECONDS, Clock, Kind, LineStream, OllamaBuilder
from parallm.server.ollama.names import OllamaRoute, model_called, own_name
from parallm.server.ollama.schemas import (
    AnsweredMessage,
    GenerationFields,
    OllamaChatAnswer,
    OllamaChatBody,
    OllamaGenerateAnswer,
    OllamaGenerateBody,
    object_of,
    timestamp,
)
from parallm.server.ollama.translate import OllamaRequest, generate_request, prepared_chat
from parallm.server.openai.grammars import constrained
from parallm.server.request_limits import check_items
from parallm.server.schemas import checked
from parallm.server.service import Service

LINES = "application/x-ndjson"
DROPPED = "x-dropped-messages"
"""Header with the number of oldest messages that a chat is answered without."""
NEUTRAL = {"_debug_render_only": (False,), "width": (0,), "height": (0,), "steps": (0,)}


def generation_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=OllamaRoute)

    @router.post("/api/generate")
    async def generate(http: Request) -> Response:
        """Answer a prompt, in the format of the model's chat template unless it is `raw`."""
        clock = Clock(http)
        body, prepared = await received(service, http, partial(_read_generate, service))
        if prepared is None:
            return _loaded(service, http, body, clock, OllamaGenerateAnswer, response="")
        return await _respond(service, http, "generate", body, prepared, clock)

    @router.post("/api/chat")
    async def chat(http: Request) -> Response:
        """Answer the last message of a chat, in the format of the model's chat template."""
        clock = Clock(http)
        body, prepared = await received(service, http, partial(_read_chat, service))
        if prepared is None:
            empty = AnsweredMessage(role="assistant", content="")
            return _loaded(service, http, body, clock, OllamaChatAnswer, message=empty)
        return await _respond(service, http, "chat", body, prepared, clock)

    return router


def _read_generate(service: Service, text: bytes) -> tuple[OllamaGenerateBody, OllamaRequest | None]:
    """Raises InvalidRequest."""
    body = checked(object_of(text), OllamaGenerateBody, NEUTRAL)
    return body, generate_request(body, service) if body.prompt or body.suffix else None


def _read_chat(service: Service, text: bytes) -> tuple[OllamaChatBody, OllamaRequest | None]:
    """Raises InvalidRequest."""
    value = object_of(text)
    check_items(value.get("messages"), "messages", "messages", service.engine.max_context)
    body = checked(value, OllamaChatBody, NEUTRAL)
    return body, prepared_chat(body, service) if body.messages else None


async def _respond(
    service: Service, http: Request, kind: Kind, body: GenerationFields, prepared: OllamaRequest, clock: Clock
) -> Response:
    parsing = prepared.parsing
    reasoning = None if parsing is None else parsing.begins_in_reasoning
    requests = await constrained([prepared.request], prepared.grammar, service, reasoning=reasoning)
    context = ResponseContext(
        answer_id=prepared.request.request_id,
        body=prepared.body,
        requests=requests,
        tokenizer=service.tokenizer,
        logprobs=body.logprobs,
        on_tokens=clock.count,
    )
    builder = OllamaBuilder(context, kind, body.model, clock, parsing)
    clock.ask()
    with model_called(body.model):
        response = await respond(service, http, builder, LineStream(builder) if body.stream else None)
    if body.stream:
        response.headers["content-type"] = LINES
    if prepared.num_dropped:
        response.headers[DROPPED] = str(prepared.num_dropped)
    return response


def _loaded(
    service: Service,
    http: Request,
    body: GenerationFields,
    clock: Clock,
    answer: type[OllamaGenerateAnswer] | type[OllamaChatAnswer],
    **empty: Any,
) -> Response:
    """Answer a request without a prompt, whose model is loaded when it comes here."""
    is_unloaded = body.keep_alive == 0
    if LOAD_SECONDS not in http.scope:
        with model_called(body.model):
            if own_name(service, body.model) not in model_names(service):
                raise UnknownModel(body.model)
        if is_unloaded:
            raise Unavailable(
                f"keep_alive is 0, and {body.model[:200]} is of the base that this process was started with, which "
                "stays loaded until it ends; models of registry.folders can be unloaded"
            )
    fields: dict[str, Any] = {"done_reason": "unload" if is_unloaded else "load", **clock.durations(), **empty}
    return json_response(answer(model=body.model, created_at=timestamp(), done=True, **fields))
