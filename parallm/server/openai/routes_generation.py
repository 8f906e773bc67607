"""`POST /v1/completions` and `POST /v1/chat/completions`."""

import uuid
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.conversation import GrammarSource
from parallm.server.connection import received
from parallm.server.generation import ChunkStream, ResponseContext, StreamBuilder, respond
from parallm.server.openai.chat_builder import ChatBuilder
from parallm.server.openai.chat_schemas import ChatBody
from parallm.server.openai.completion_builder import CompletionBuilder
from parallm.server.openai.completion_schemas import CompletionBody, GenerationBody
from parallm.server.openai.grammars import body_grammar, chat_grammar, constrained
from parallm.server.openai.logprobs import TokenNumbers
from parallm.server.openai.translate import chat_request, completion_requests, effective_body
from parallm.server.request_limits import check_items
from parallm.server.schemas import checked, parse_body, read_object
from parallm.server.service import Service
from parallm.types import GenerationRequest


def generation_routes(service: Service) -> APIRouter:
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

    return router


def response_context(
    service: Service, answer_id: str, body: GenerationBody, requests: Sequence[GenerationRequest], *, logprobs: bool
) -> ResponseContext:
    echo = {
        "request_id": body.request_id,
        "step_id": body.step_id,
        "logprobs_mode": "temperature" if logprobs else None,
    }
    return ResponseContext(
        answer_id=answer_id,
        body=body,
        requests=requests,
        tokenizer=service.tokenizer,
        token_texts=TokenNumbers() if body.return_tokens_as_token_ids else service.tokenizer,
        logprobs=logprobs,
        echo={name: value for name, value in echo.items() if value is not None},
    )


def _prepare_completions(service: Service, text: bytes) -> tuple[CompletionBuilder, GrammarSource | None]:
    """Raises InvalidRequest."""
    body = effective_body(parse_body(text, CompletionBody), service)
    answer_id = f"cmpl-{body.request_id or uuid.uuid4().hex}"
    requests = completion_requests(body, answer_id, service)
    context = response_context(service, answer_id, body, requests, logprobs=body.logprobs is not None)
    return CompletionBuilder(context, body), body_grammar(body)


def _prepare_chat(service: Service, text: bytes) -> tuple[ChatBuilder, GrammarSource | None]:
    """Raises InvalidRequest."""
    value = read_object(text)
    check_items(value.get("messages"), "messages", "messages", service.engine.max_context)
    body = effective_body(checked(value, ChatBody), service)
    answer_id = f"chatcmpl-{body.request_id or uuid.uuid4().hex}"
    request, parsing = chat_request(body, answer_id, service)
    context = response_context(service, answer_id, body, [request], logprobs=body.logprobs)
    return ChatBuilder(context, parsing), chat_grammar(body)


async def _respond(
    service: Service, http: Request, builder: StreamBuilder, grammar: GrammarSource | None, *, reasoning: bool | None
) -> Response:
    context = builder.context
    context.requests = await constrained(context.requests, grammar, service, reasoning=reasoning)
    return await respond(service, http, builder, ChunkStream(service, builder) if context.body.stream else None)
