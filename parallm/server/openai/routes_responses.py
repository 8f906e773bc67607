"""`POST /v1/responses`."""

import time
import uuid
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest
from parallm.server.answers import Head
from parallm.server.connection import read_body
from parallm.server.generation import begin_stream, on_a_side, respond_whole
from parallm.server.lora_adapter import with_lora_adapter
from parallm.server.openai.grammars import chat_grammar, constrained
from parallm.server.openai.message_reader import Reading
from parallm.server.openai.response_answers import ResponseAnswers
from parallm.server.openai.response_chat import named_as_sent, to_chat
from parallm.server.openai.response_events import ResponseEvents
from parallm.server.openai.response_schemas import ResponseBody
from parallm.server.openai.sampling_defaults import with_defaults
from parallm.server.openai.translate import chat_request
from parallm.server.parse import parse_body
from parallm.server.service import Service
from parallm.server.sse import EventStream
from parallm.types import GenerationRequest


def response_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses")
    async def responses(http: Request) -> Response:
        """Answer a conversation of messages, reasoning and function calls. Nothing of it is stored."""
        body = parse_body(await read_body(http, service.settings.max_body_bytes), ResponseBody)
        body = with_defaults(body, service.sampling_defaults)  # the answer shows these fields
        answer_id = f"resp_{uuid.uuid4().hex}"
        try:
            return await _respond(service, http, body, answer_id)
        except InvalidRequest as error:
            raise named_as_sent(error) from error

    return router


async def _respond(service: Service, http: Request, body: ResponseBody, answer_id: str) -> Response:
    requests, reading = await _requests(service, body, answer_id)

    async def answer(routed: Sequence[GenerationRequest]) -> Response:
        answers = ResponseAnswers(_head(service, answer_id, routed), reading, body)
        if not body.stream:
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


async def _requests(service: Service, body: ResponseBody, answer_id: str) -> tuple[list[GenerationRequest], Reading]:
    chat = with_defaults(with_lora_adapter(service, to_chat(body)), service.sampling_defaults)
    request, reading = chat_request(
        chat,
        answer_id,
        tokenizer=service.tokenizer,
        settings=service.settings,
        max_context=service.engine.max_context,
    )
    requests = await constrained([request], chat_grammar(chat), service, reasoning=reading.begins_in_reasoning)
    return requests, reading
