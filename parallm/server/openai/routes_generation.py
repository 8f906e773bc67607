"""`POST /v1/completions` and `POST /v1/chat/completions`."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from parallm.conversation import GrammarSource
from parallm.server.catalog import with_lora_adapter
from parallm.server.connection import received
from parallm.server.control.trajectory_recorder import recorder_for
from parallm.server.generation import ResponseContext, StreamBuilder, on_a_side, respond_stream, respond_whole
from parallm.server.openai.chat_builder import ChatBuilder
from parallm.server.openai.chat_schemas import ChatBody
from parallm.server.openai.completion_builder import CompletionBuilder
from parallm.server.openai.grammars import body_grammar, chat_grammar, constrained
from parallm.server.openai.logprobs import TokenNumbers
from parallm.server.openai.output_parser import OutputParsing
from parallm.server.openai.translate import chat_request, completion_requests
from parallm.server.schemas import CompletionBody, GenerationBody, StreamOptions, checked, parse_body, read_object
from parallm.server.service import Service
from parallm.server.text_bounds import check_items
from parallm.types import GenerationRequest

Body = TypeVar("Body", bound=BaseModel)


def with_defaults(body: Body, defaults: Mapping[str, float]) -> Body:
    """Return the body with `defaults` for the fields that were not sent.

    A body with `collect_trajectory` stays as it is, since the policy learns from its own samples.
    """
    if getattr(body, "collect_trajectory", False):
        return body
    missing = defaults.keys() & type(body).model_fields.keys() - body.model_fields_set
    return body.model_copy(update={name: defaults[name] for name in missing}) if missing else body


Requests = Sequence[GenerationRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedCompletions:
    """What a body of `/v1/completions` asks for."""

    body: CompletionBody
    answer_id: str
    requests: Requests
    grammar: GrammarSource | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedChat:
    """What a body of `/v1/chat/completions` asks for."""

    body: ChatBody
    answer_id: str
    request: GenerationRequest
    parsing: OutputParsing
    grammar: GrammarSource | None


def generation_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(http: Request) -> Response:
        """Complete one or more prompts, given as text or as token ids."""
        asked = await received(service, http, partial(_asked_completions, service))
        requests = await constrained(asked.requests, asked.grammar, service, reasoning=None)

        async def answer(routed: Requests) -> Response:
            context = response_context(
                service, asked.answer_id, asked.body, routed, logprobs=asked.body.logprobs is not None
            )
            return await _respond(service, http, asked.body, CompletionBuilder(context, asked.body))

        return await on_a_side(service, requests, answer)

    @router.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        """Answer the last message of a chat, in the format of the model's chat template."""
        asked = await received(service, http, partial(_asked_chat, service))
        reasoning = asked.parsing.begins_in_reasoning
        requests = await constrained([asked.request], asked.grammar, service, reasoning=reasoning)

        async def answer(routed: Requests) -> Response:
            context = response_context(service, asked.answer_id, asked.body, routed, logprobs=asked.body.logprobs)
            return await _respond(service, http, asked.body, ChatBuilder(context, asked.parsing))

        return await on_a_side(service, requests, answer)

    return router


def _asked_completions(service: Service, text: bytes) -> AskedCompletions:
    """Raises InvalidRequest."""
    body = parse_body(text, CompletionBody)
    body = with_defaults(with_lora_adapter(service, body), service.sampling_defaults)
    answer_id = f"cmpl-{body.request_id or uuid.uuid4().hex}"
    return AskedCompletions(
        body=body, answer_id=answer_id, requests=requests_of(service, body, answer_id), grammar=body_grammar(body)
    )


def _asked_chat(service: Service, text: bytes) -> AskedChat:
    """Raises InvalidRequest."""
    value = read_object(text)
    check_items(value.get("messages"), "messages", "messages", service.engine.max_context)
    body = checked(value, ChatBody)
    body = with_defaults(with_lora_adapter(service, body), service.sampling_defaults)
    answer_id = f"chatcmpl-{body.request_id or uuid.uuid4().hex}"
    request, parsing = chat_request_of(service, body, answer_id)
    return AskedChat(body=body, answer_id=answer_id, request=request, parsing=parsing, grammar=chat_grammar(body))


def requests_of(service: Service, body: CompletionBody, answer_id: str) -> list[GenerationRequest]:
    """One request for each prompt. Raises InvalidRequest."""
    return completion_requests(
        body,
        answer_id,
        tokenizer=service.tokenizer,
        settings=service.settings,
        max_context=service.engine.max_context,
    )


def chat_request_of(service: Service, body: ChatBody, answer_id: str) -> tuple[GenerationRequest, OutputParsing]:
    """Raises InvalidRequest."""
    return chat_request(
        body,
        answer_id,
        tokenizer=service.tokenizer,
        settings=service.settings,
        max_context=service.engine.max_context,
    )


def response_context(
    service: Service, answer_id: str, body: GenerationBody, routed: Requests, *, logprobs: bool
) -> ResponseContext:
    options = body.stream_options or StreamOptions()
    return ResponseContext(
        answer_id=answer_id,
        created=int(time.time()),
        requests=routed,
        recorder=recorder_for(body, service, routed),
        tokenizer=service.tokenizer,
        token_texts=TokenNumbers() if body.return_tokens_as_token_ids else service.tokenizer,
        logprobs=logprobs,
        token_ids=body.return_token_ids,
        usage_chunk=options.include_usage,
        usage_in_chunks=options.continuous_usage_stats,
        echo=echo_of(body, logprobs=logprobs),
    )


def echo_of(body: GenerationBody, *, logprobs: bool) -> dict[str, object]:
    """What every chunk of the answer carries, as far as the request asks for it."""
    wanted = {
        "request_id": body.request_id,
        "step_id": body.step_id,
        "logprobs_mode": "temperature" if logprobs else None,
    }
    return {name: value for name, value in wanted.items() if value is not None}


async def _respond(service: Service, http: Request, body: GenerationBody, answers: StreamBuilder) -> Response:
    return await (respond_stream if body.stream else respond_whole)(service, http, answers)
