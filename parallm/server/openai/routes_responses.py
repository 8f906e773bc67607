"""`POST /v1/responses`."""

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.conversation import GrammarSource
from parallm.errors import InvalidRequest
from parallm.server.catalog import with_lora_adapter
from parallm.server.connection import received
from parallm.server.generation import ResponseContext, on_a_side, respond_whole, start_stream
from parallm.server.openai.chat_schemas import ChatBody
from parallm.server.openai.grammars import chat_grammar, constrained
from parallm.server.openai.output_parser import OutputParsing
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
from parallm.server.openai.routes_generation import chat_request_of, with_defaults
from parallm.server.schemas import checked, read_object
from parallm.server.service import Service
from parallm.server.streaming import EventStream
from parallm.server.text_bounds import check_items
from parallm.types import GenerationRequest


def to_chat(body: ResponseBody) -> ChatBody:
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


def named_as_sent(error: InvalidRequest) -> InvalidRequest:
    """The error with the field's name of this endpoint."""
    names = {
        "messages": "input",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
    }
    head, dot, rest = (error.parameter or "").partition(".")
    error.parameter = (names.get(head, head) + (dot + rest if head not in names else "")) or None
    return error


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
    """The assistant's turn that the next item belongs to: the last message, or a new one where that has it already."""
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
    asked = body.text.format
    if isinstance(asked, ResponseSchemaFormat):
        schema = {"name": asked.name, "schema": asked.json_schema}
        return {"type": "json_schema", "json_schema": schema}
    return {"type": asked.type}


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedResponse:
    """What a body asks for."""

    body: ResponseBody
    answer_id: str
    request: GenerationRequest
    parsing: OutputParsing
    grammar: GrammarSource | None


def response_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses")
    async def responses(http: Request) -> Response:
        """Answer a conversation of messages, reasoning and function calls. Nothing of it is stored."""
        asked = await received(service, http, partial(_asked, service))
        with _named_as_sent():
            return await _respond(service, http, asked)

    return router


@contextmanager
def _named_as_sent() -> Iterator[None]:
    """Errors about the chat name the fields of this endpoint."""
    try:
        yield
    except InvalidRequest as error:
        raise named_as_sent(error) from error


async def _respond(service: Service, http: Request, asked: AskedResponse) -> Response:
    reasoning = asked.parsing.begins_in_reasoning
    requests = await constrained([asked.request], asked.grammar, service, reasoning=reasoning)

    async def answer(routed: Sequence[GenerationRequest]) -> Response:
        answers = ResponsesBuilder(_head(service, asked.answer_id, routed), asked.parsing, asked.body)
        if not asked.body.stream:
            return await respond_whole(service, http, answers)
        begun = await start_stream(service, http, routed)
        events = ResponsesStream(service, answers)
        return EventStream(
            events.encoded(begun), begun.events, stall_seconds=service.settings.stall_seconds, failed=events.failed
        )

    return await on_a_side(service, requests, answer)


def _head(service: Service, answer_id: str, routed: Sequence[GenerationRequest]) -> ResponseContext:
    return ResponseContext(
        answer_id=answer_id,
        created=int(time.time()),
        requests=routed,
        tokenizer=service.tokenizer,
        token_texts=service.tokenizer,
        logprobs=False,
        token_ids=False,
        usage_chunk=False,
    )


def _asked(service: Service, text: bytes) -> AskedResponse:
    """Raises InvalidRequest."""
    value = read_object(text)
    check_items(value.get("input"), "items", "input", service.engine.max_context)
    body = with_defaults(checked(value, ResponseBody), service.sampling_defaults)  # the answer shows these fields
    answer_id = f"resp_{uuid.uuid4().hex}"
    with _named_as_sent():
        chat = with_defaults(with_lora_adapter(service, to_chat(body)), service.sampling_defaults)
        request, parsing = chat_request_of(service, chat, answer_id)
        grammar = chat_grammar(chat)
    return AskedResponse(body=body, answer_id=answer_id, request=request, parsing=parsing, grammar=grammar)
