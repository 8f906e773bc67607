"""Routes of rollout workers: `/generate` in five dialects, `/inference/v1/generate`, text to tokens and back."""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest, ParallmError
from parallm.server.connection import error_response, json_response, read_body
from parallm.server.dialects.dialect import Asked, Dialect
from parallm.server.dialects.dispatch import dialect_of
from parallm.server.dialects.native import NATIVE
from parallm.server.dialects.token_bodies import DetokenizeBody, TextOfTokens, TokenizeBody, TokensOfText
from parallm.server.dialects.token_in_token_out import TOKEN_IN_TOKEN_OUT
from parallm.server.failures import DeadlineExceeded, failure_of
from parallm.server.generation import on_a_side, respond_stream, respond_whole
from parallm.server.lora_adapter import with_lora_adapter
from parallm.server.openai.chat_prompt import chat_prompt
from parallm.server.openai.grammars import body_grammar, constrained
from parallm.server.openai.routes_generation import head_of
from parallm.server.openai.translate import completion_requests
from parallm.server.parse import parse_body, read_object
from parallm.server.service import Service
from parallm.types import BASE, POLICY, GenerationRequest


def data_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/generate")
    @router.post("/generate/")
    @router.post("//generate")  # Atropos makes it of a base URL that ends with a slash
    async def generate(http: Request) -> Response:
        """Completions in the dialect that the keys of the body tell: ours, SGLang's, TRL's and others'."""
        return await _answer(service, http, NATIVE, dialect_of)

    @router.post("/inference/v1/generate")
    async def generate_tokens(http: Request) -> Response:
        """Token ids in, token ids out, as vLLM's disaggregated route."""
        return await _answer(service, http, TOKEN_IN_TOKEN_OUT, lambda _: TOKEN_IN_TOKEN_OUT)

    @router.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        """Token ids of a text, or of a chat with the model's template."""
        body = parse_body(await read_body(http, service.settings.max_body_bytes), TokenizeBody)
        return json_response(_tokenized(service, body))

    @router.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        """Text of token ids, special tokens shown."""
        body = parse_body(await read_body(http, service.settings.max_body_bytes), DetokenizeBody)
        return json_response(TextOfTokens(prompt=service.tokenizer.decode(body.tokens, special=True)))

    return router


async def _answer(
    service: Service, http: Request, usual: Dialect, choose: Callable[[Mapping[str, Any]], Dialect]
) -> Response:
    """Errors have the form of the dialect; `usual` is that of bodies that are no JSON objects."""
    dialect = usual
    try:
        value = read_object(await read_body(http, service.settings.max_body_bytes))
        dialect = choose(value)
        asked = dialect.read(value if value.get("model") is not None else value | _usual_model(service, value))
        async with asyncio.timeout(asked.timeout_seconds):
            return await _respond(service, http, asked)
    except TimeoutError:
        told = failure_of(DeadlineExceeded("the request was not done in the time that it gave itself (timeout)"))
    except ParallmError as error:
        told = failure_of(error)
    return error_response(told, dialect.refusal(told))


async def _respond(service: Service, http: Request, asked: Asked) -> Response:
    body = with_lora_adapter(service, asked.body)
    answer_id = body.request_id or f"gen-{uuid.uuid4().hex}"
    requests = completion_requests(
        body,
        answer_id,
        tokenizer=service.tokenizer,
        settings=service.settings,
        max_context=service.engine.max_context,
    )
    requests = await constrained(requests, body_grammar(body), service, reasoning=None)
    # these answers say the ids and the mode themselves, at the places of their dialects
    plain = body.model_copy(update={"request_id": None, "step_id": None})
    num_running = service.engine.stats().num_running

    async def answer(routed: Sequence[GenerationRequest]) -> Response:
        head = replace(head_of(service, answer_id, plain, routed, logprobs=False), num_running=num_running)
        if body.stream and asked.stream is not None:
            return await respond_stream(service, http, asked.stream(head))
        return await respond_whole(service, http, asked.whole(head))

    return await on_a_side(service, requests, answer)


def _usual_model(service: Service, value: Mapping[str, Any]) -> dict[str, str]:
    """For bodies that name no `model`. Of several policies none is meant."""
    if value.get("lora_adapter") is not None:
        return {"model": BASE}
    return {"model": service.policies[0] if len(service.policies) == 1 else POLICY}


def _tokenized(service: Service, body: TokenizeBody) -> TokensOfText:
    tokenizer = service.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", "prompt")
    if body.messages is not None:
        tokens = chat_prompt(body.as_chat(), tokenizer).tokens
    else:
        encode = tokenizer.encode if body.add_special_tokens else tokenizer.encode_more
        tokens = encode(body.prompt or "")
    return TokensOfText(
        count=len(tokens),
        max_model_len=service.engine.max_context,
        tokens=list(tokens),
        token_strs=[tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None,
    )
