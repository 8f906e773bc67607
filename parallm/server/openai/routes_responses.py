"""`POST /v1/responses`."""

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.conversation import GrammarSource
from parallm.errors import InvalidRequest
from parallm.server.answers import Head
from parallm.server.connection import received
from parallm.server.generation import begin_stream, on_a_side, respond_whole
from parallm.server.lora_adapter import with_lora_adapter
from parallm.server.openai.grammars import chat_grammar, constrained
from parallm.server.openai.message_reader import Reading
from parallm.server.openai.response_answers import ResponseAnswers
from parallm.server.openai.response_chat import named_as_sent, to_chat
from parallm.server.openai.response_events import ResponseEvents
from parallm.server.openai.response_schemas import ResponseBody
from parallm.server.openai.routes_generation import chat_request_of
from parallm.server.openai.sampling_defaults import with_defaults
from parallm.server.parse import checked, read_object
from parallm.server.service import Service
from parallm.server.sse import EventStream
from parallm.server.text_bounds import check_items
from parallm.types import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedResponse:
    """What a body asks for."""

    body: ResponseBody
    answer_id: str
    request: GenerationRequest
    reading: Reading
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
    reasoning = asked.reading.begins_in_reasoning
    requests = await constrained([asked.request], asked.grammar, service, reasoning=reasoning)

    async def answer(routed: Sequence[GenerationRequest]) -> Response:
        answers = ResponseAnswers(_head(service, asked.answer_id, routed), asked.reading, asked.body)
        if not asked.body.stream:
            return await respond_whole(service, http, answers)
        begun = await begin_stream(service, http, routed)
        events = ResponseEvents(service, answers)
        return EventStream(
            events.encoded(begun), begun.events, stall_seconds=service.settings.stall_seconds, failed=events.failed
        )

    return await on_a_side(service, requests, answer)


def _head(service: Service, answer_id: str, routed: Sequence[GenerationRequest]) -> Head:
    return Head(
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
        request, reading = chat_request_of(service, chat, answer_id)
        grammar = chat_grammar(chat)
    return AskedResponse(body=body, answer_id=answer_id, request=request, reading=reading, grammar=grammar)
