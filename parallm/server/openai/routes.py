"""OpenAI's routes: completions, chats, responses (the chat endpoint in other words), and the names of models."""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.conversation import GrammarSource
from parallm.errors import InvalidRequest, Unavailable, UnknownModel
from parallm.model.adapters.names import versioned
from parallm.registry.records import Loaded, Named
from parallm.server.catalog import card_of, model_names
from parallm.server.connection import json_response, received
from parallm.server.generation import ChunkStream, ResponseContext, respond
from parallm.server.interfaces import Models
from parallm.server.openai.answer_builders import ChatBuilder, CompletionBuilder
from parallm.server.openai.chat_schemas import ChatBody
from parallm.server.openai.completion_schemas import CompletionBody
from parallm.server.openai.grammars import body_grammar, chat_grammar, constrained
from parallm.server.openai.responses_builder import ResponsesBuilder, ResponsesStream
from parallm.server.openai.responses_schemas import (
    InputCall,
    InputCallOutput,
    InputMessage,
    InputReasoning,
    ResponseBody,
    ResponseNamedTool,
    ResponseSchemaFormat,
)
from parallm.server.openai.translate import chat_request, completion_requests, effective_body, with_defaults
from parallm.server.request_limits import check_items
from parallm.server.schemas import Wire, checked, parse_body, read_object
from parallm.server.service import Service
from parallm.types import BASE, TaskSpec

FIELD_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""Names of chat fields at `/v1/responses`."""


class ModelEntry(Wire):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    policy_version: int
    task: TaskSpec | None = None
    """What the model makes of texts beside other text; absent: nothing."""
    end_token: int | None = None
    """Token that such texts have to end with."""
    loaded: bool | None = None
    """Whether the model is in memory; absent, with what follows: it is of this process's own base."""
    pinned: bool | None = None
    expires_at: float | None = None
    """Unix seconds; null: it answers just now, stays until its memory is needed, or is not in memory."""
    memory_bytes: int | None = None
    """What it takes in memory, with its keys and values."""
    size: int | None = None
    """Bytes of its files."""
    digest: str | None = None
    modified: float | None = None
    """Unix seconds."""
    capabilities: tuple[str, ...] | None = None
    missing: bool | None = None
    """Whether its files were gone at the last scan."""


class ModelList(Wire):
    object: Literal["list"]
    data: list[ModelEntry]


def openai_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(http: Request) -> Response:
        """Complete one or more prompts, given as text or as token ids."""
        builder, grammar = await received(service, http, partial(_prepare_completions, service))
        return await _respond(service, http, builder, grammar, reasoning=None)

    @router.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        """Answer the last message of a chat, in the format of the model's chat template."""
        builder, grammar = await received(service, http, partial(_prepare_chat, service))
        return await _respond(service, http, builder, grammar, reasoning=builder.parsing.begins_in_reasoning)

    @router.post("/v1/responses")
    async def responses(http: Request) -> Response:
        """Answer a conversation of messages, reasoning and function calls. Nothing of it is stored."""
        builder, grammar = await received(service, http, partial(_prepare_response, service))
        with _field_names_of_responses():
            return await _respond(service, http, builder, grammar, reasoning=builder.parsing.begins_in_reasoning)

    @router.get("/v1/models")
    @router.get("/models")
    async def models() -> Response:
        """Every name that `model` may be: the base, adapters, their versions and aliases; models of the catalogue."""
        data = [_model_entry(name, service) for name in model_names(service)]
        if service.models is not None:
            data += _registered(service.models, await service.models.names())
        return json_response(ModelList(object="list", data=data))

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One of these names, or another that `model` may be."""
        if service.models is not None and not service.serves(name):
            (entry,) = _registered(service.models, [await service.models.describe(name)])
            return json_response(entry)
        return json_response(_model_entry(name, service))

    return router


def _prepare_completions(service: Service, text: bytes) -> tuple[CompletionBuilder, GrammarSource | None]:
    """Raises InvalidRequest."""
    body = effective_body(parse_body(text, CompletionBody), service)
    answer_id = f"cmpl-{body.request_id or uuid.uuid4().hex}"
    requests = completion_requests(body, answer_id, service)
    context = ResponseContext(
        answer_id=answer_id,
        body=body,
        requests=requests,
        tokenizer=service.tokenizer,
        logprobs=body.logprobs is not None,
    )
    return CompletionBuilder(context, body), body_grammar(body)


def _prepare_chat(service: Service, text: bytes) -> tuple[ChatBuilder, GrammarSource | None]:
    """Raises InvalidRequest."""
    value = read_object(text)
    check_items(value.get("messages"), "messages", "messages", service.engine.max_context)
    body = effective_body(checked(value, ChatBody), service)
    answer_id = f"chatcmpl-{body.request_id or uuid.uuid4().hex}"
    request, parsing = chat_request(body, answer_id, service)
    context = ResponseContext(
        answer_id=answer_id, body=body, requests=[request], tokenizer=service.tokenizer, logprobs=body.logprobs
    )
    return ChatBuilder(context, parsing), chat_grammar(body)


def _prepare_response(service: Service, text: bytes) -> tuple[ResponsesBuilder, GrammarSource | None]:
    """Raises InvalidRequest."""
    value = read_object(text)
    check_items(value.get("input"), "items", "input", service.engine.max_context)
    body = with_defaults(checked(value, ResponseBody), service.sampling_defaults)  # the answer shows these fields
    answer_id = f"resp_{uuid.uuid4().hex}"
    with _field_names_of_responses():
        chat = effective_body(_to_chat(body), service)
        request, parsing = chat_request(chat, answer_id, service)
        context = ResponseContext(answer_id=answer_id, body=chat, requests=[request], tokenizer=service.tokenizer)
        return ResponsesBuilder(context, parsing, body), chat_grammar(chat)


async def _respond(
    service: Service,
    http: Request,
    builder: CompletionBuilder | ChatBuilder | ResponsesBuilder,
    grammar: GrammarSource | None,
    *,
    reasoning: bool | None,
) -> Response:
    context = builder.context
    context.requests = await constrained(context.requests, grammar, service, reasoning=reasoning)
    if not context.body.stream:
        return await respond(service, http, builder)
    if isinstance(builder, ResponsesBuilder):
        return await respond(service, http, builder, ResponsesStream(service, builder))
    return await respond(service, http, builder, ChunkStream(service, builder))


@contextmanager
def _field_names_of_responses() -> Iterator[None]:
    """Make errors about the chat name the fields of this endpoint."""
    try:
        yield
    except InvalidRequest as error:
        name, dot, inner = (error.parameter or "").partition(".")
        error.parameter = FIELD_NAMES.get(name, name + dot + inner) or None
        raise


def _to_chat(body: ResponseBody) -> ChatBody:
    """Raises InvalidRequest where an item does not fit those around it."""
    same = {"model", "lora_adapter", "temperature", "top_p", "stream", "parallel_tool_calls", "user"}
    form = body.text.format
    fields = body.model_dump(include=same) | {
        "messages": _messages(body),
        "tools": [
            {"type": tool.type, "function": tool.model_dump(exclude_none=True, exclude={"type"})} for tool in body.tools
        ],
        "tool_choice": body.tool_choice,
        "response_format": {"type": form.type},
    }
    if isinstance(body.tool_choice, ResponseNamedTool):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    if isinstance(form, ResponseSchemaFormat):
        fields["response_format"]["json_schema"] = {"name": form.name, "schema": form.json_schema}
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    return ChatBody.model_validate(fields)


def _messages(body: ResponseBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    for item in body.input:
        match item:
            case InputMessage(role="assistant"):
                _turn(messages, "content")["content"] = "".join(part.text for part in item.content)
            case InputMessage():
                messages.append({"role": item.role, "content": "".join(part.text for part in item.content)})
            case InputReasoning():
                _turn(messages, "reasoning_content")["reasoning_content"] = "".join(part.text for part in item.content)
            case InputCall():
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                _turn(messages, None).setdefault("tool_calls", []).append(call)
            case InputCallOutput():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
    return messages


def _turn(messages: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    """Return the assistant's turn that the next item belongs to: the last message, or a new one if that is complete."""
    last = messages[-1] if messages else {"role": ""}
    is_over = last["role"] != "assistant" or (name is not None and (name in last or "tool_calls" in last))
    if is_over or (name == "reasoning_content" and "content" in last):
        messages.append({"role": "assistant"})
    return messages[-1]


def _model_entry(name: str, service: Service) -> ModelEntry:
    """Return the entry of a name of the list, or of another way to say it. Raises UnknownModel."""
    card = card_of(name, service.catalog())
    # without a card: the base, or a policy before its first version
    if card is None and name not in (names := model_names(service)):
        raise UnknownModel(f"no model {name[:200]!r}; there are {sorted(set(names))}")
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
        **_task_of(name, service),
    )


def _registered(models: Models, named: Sequence[Named]) -> list[ModelEntry]:
    """Return the entries of names of the catalogue."""
    loaded = {name: model for model in models.loaded() for name in model.names}
    return [_registered_entry(one, loaded.get(one.name)) for one in named]


def _registered_entry(named: Named, loaded: Loaded | None) -> ModelEntry:
    model = named.model
    return ModelEntry(
        id=named.name,
        object="model",
        created=int(named.created_at),
        owned_by="parallm",
        root=model.source,
        parent=None,
        max_model_len=model.context or 0,
        policy_version=0,
        loaded=loaded is not None and loaded.state in ("ready", "draining"),
        pinned=named.is_pinned,
        expires_at=None if loaded is None else loaded.expires_at,
        memory_bytes=None if loaded is None else loaded.num_bytes,
        size=model.num_bytes,
        digest=model.digest,
        modified=model.modified_at,
        capabilities=model.capabilities,
        missing=model.is_missing,
    )


def _task_of(name: str, service: Service) -> dict[str, Any]:
    """Return the fields of `ModelEntry` for a model that makes something of texts."""
    if service.encoder is None:
        return {}
    try:
        spec = service.encoder.spec(name)
    except (UnknownModel, Unavailable):
        return {}
    return {"task": spec, "end_token": service.encoder.end_token(spec)}
