"""`POST /v1/completions` and `POST /v1/chat/completions`."""

import time
import uuid
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.server.answers import Answers, Head
from parallm.server.connection import read_body
from parallm.server.control.recording import recorder_of
from parallm.server.generation import on_a_side, respond_stream, respond_whole
from parallm.server.lora_adapter import with_lora_adapter
from parallm.server.openai.chat_answers import ChatAnswers
from parallm.server.openai.chat_schemas import ChatBody
from parallm.server.openai.completion_answers import CompletionAnswers
from parallm.server.openai.grammars import body_grammar, chat_grammar, constrained
from parallm.server.openai.sampling_defaults import with_defaults
from parallm.server.openai.token_numbers import TokenNumbers
from parallm.server.openai.translate import chat_request, completion_requests
from parallm.server.parse import parse_body
from parallm.server.schemas import CompletionBody, GenerationBody, StreamOptions
from parallm.server.service import Service
from parallm.types import GenerationRequest

Requests = Sequence[GenerationRequest]


def generation_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(http: Request) -> Response:
        """Complete one or more prompts, given as text or as token ids."""
        body = parse_body(await read_body(http, service.settings.max_body_bytes), CompletionBody)
        body = with_defaults(with_lora_adapter(service, body), service.sampling_defaults)
        answer_id = f"cmpl-{body.request_id or uuid.uuid4().hex}"
        requests = completion_requests(
            body,
            answer_id,
            tokenizer=service.tokenizer,
            settings=service.settings,
            max_context=service.engine.max_context,
        )
        requests = await constrained(requests, body_grammar(body), service, reasoning=None)

        async def answer(routed: Requests) -> Response:
            head = head_of(service, answer_id, body, routed, logprobs=body.logprobs is not None)
            return await _respond(service, http, body, CompletionAnswers(head, body))

        return await on_a_side(service, requests, answer)

    @router.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        """Answer the last message of a chat, in the format of the model's chat template."""
        body = parse_body(await read_body(http, service.settings.max_body_bytes), ChatBody)
        body = with_defaults(with_lora_adapter(service, body), service.sampling_defaults)
        answer_id = f"chatcmpl-{body.request_id or uuid.uuid4().hex}"
        request, reading = chat_request(
            body,
            answer_id,
            tokenizer=service.tokenizer,
            settings=service.settings,
            max_context=service.engine.max_context,
        )
        requests = await constrained([request], chat_grammar(body), service, reasoning=reading.begins_in_reasoning)

        async def answer(routed: Requests) -> Response:
            head = head_of(service, answer_id, body, routed, logprobs=body.logprobs)
            return await _respond(service, http, body, ChatAnswers(head, reading))

        return await on_a_side(service, requests, answer)

    return router


def head_of(service: Service, answer_id: str, body: GenerationBody, routed: Requests, *, logprobs: bool) -> Head:
    options = body.stream_options or StreamOptions()
    return Head(
        answer_id=answer_id,
        created=int(time.time()),
        requests=routed,
        recorder=recorder_of(body, service, routed),
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


async def _respond(service: Service, http: Request, body: GenerationBody, answers: Answers) -> Response:
    return await (respond_stream if body.stream else respond_whole)(service, http, answers)
