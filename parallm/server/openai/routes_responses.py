"""`POST /v1/responses`: the chat endpoint in other words."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.conversation import GrammarSource
from parallm.errors import InvalidRequest
from parallm.server.connection import received
from parallm.server.generation import respond
from parallm.server.openai.chat_schemas import ChatBody
from parallm.server.openai.grammars import chat_grammar, constrained
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
from parallm.server.openai.routes_generation import response_context
from parallm.server.openai.translate import chat_request, effective_body, with_defaults
from parallm.server.request_limits import check_items
from parallm.server.schemas import checked, read_object
from parallm.server.service import Service

FIELD_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""Names of chat fields at this endpoint."""


def response_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses")
    async def responses(http: Request) -> Response:
        """Answer a conversation of messages, reasoning and function calls. Nothing of it is stored."""
        builder, grammar = await received(service, http, partial(_prepare, service))
        context = builder.context
        with _own_field_names():
            reasoning = builder.parsing.begins_in_reasoning
            context.requests = await constrained(context.requests, grammar, service, reasoning=reasoning)
            writer = ResponsesStream(service, builder) if context.body.stream else None
            return await respond(service, http, builder, writer)

    return router


def _prepare(service: Service, text: bytes) -> tuple[ResponsesBuilder, GrammarSource | None]:
    """Raises InvalidRequest."""
    value = read_object(text)
    check_items(value.get("input"), "items", "input", service.engine.max_context)
    body = with_defaults(checked(value, ResponseBody), service.sampling_defaults)  # the answer shows these fields
    answer_id = f"resp_{uuid.uuid4().hex}"
    with _own_field_names():
        chat = effective_body(_to_chat(body), service)
        request, parsing = chat_request(chat, answer_id, service)
        context = response_context(service, answer_id, chat, [request], logprobs=False)
        return ResponsesBuilder(context, parsing, body), chat_grammar(chat)


@contextmanager
def _own_field_names() -> Iterator[None]:
    """Make errors about the chat name the fields of this endpoint."""
    try:
        yield
    except InvalidRequest as error:
        name, dot, inner = (error.parameter or "").partition(".")
        error.parameter = FIELD_NAMES.get(name, name + dot + inner) or None
        raise


def _to_chat(body: ResponseBody) -> ChatBody:
    """Raises InvalidRequest where an item does not fit those around it."""
    fields: dict[str, Any] = {
        "model": body.model,
        "lora_adapter": body.lora_adapter,
        "messages": _messages(body),
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools],
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body),
        "user": body.user,
    }
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


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(body: ResponseBody) -> object:
    if isinstance(body.tool_choice, ResponseNamedTool):
        return {"type": "function", "function": {"name": body.tool_choice.name}}
    return body.tool_choice


def _format(body: ResponseBody) -> dict[str, Any]:
    form = body.text.format
    if isinstance(form, ResponseSchemaFormat):
        return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.json_schema}}
    return {"type": form.type}
