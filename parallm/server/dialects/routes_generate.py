"""Routes of rollout workers: `/generate` in five dialects, `/inference/v1/generate`, text to tokens and back."""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.conversation import GrammarSource
from parallm.errors import InvalidRequest, ParallmError
from parallm.server.catalog import with_lora_adapter
from parallm.server.connection import error_response, json_response, received
from parallm.server.dialects.dialect import Dialect, DialectRequest
from parallm.server.dialects.native import NATIVE
from parallm.server.dialects.routes_tokenize import DetokenizeBody, TextOfTokens, TokenizeBody, TokensOfText
from parallm.server.dialects.sglang import SGLANG
from parallm.server.dialects.trl import TRL
from parallm.server.dialects.versioned import VERSIONED
from parallm.server.dialects.vllm_legacy import LEGACY_VLLM
from parallm.server.dialects.vllm_tokens import TOKEN_IN_TOKEN_OUT
from parallm.server.failures import DeadlineExceeded, failure_of
from parallm.server.generation import on_a_side, respond_stream, respond_whole
from parallm.server.openai.grammars import body_grammar, constrained
from parallm.server.openai.routes_generation import requests_of, response_context
from parallm.server.openai.translate import chat_prompt
from parallm.server.schemas import checked, parse_body, read_object
from parallm.server.service import Service
from parallm.server.text_bounds import check_items, check_text
from parallm.types import BASE, POLICY, GenerationRequest


def dialect_of(value: Mapping[str, Any]) -> Dialect:
    """The dialect of a body by its keys; one that fits none is native, which names the field at fault."""
    if "prompts" in value:
        return TRL
    if value.keys() & {"input_ids", "text", "sampling_params"}:
        return SGLANG
    if isinstance(value.get("prompt"), dict):
        return LEGACY_VLLM
    if "policy_version" in value or _counts(value.get("logprobs")):
        return VERSIONED
    return NATIVE


def _counts(logprobs: object) -> bool:
    """Whether these are log-probs that the native form has no place for."""
    return isinstance(logprobs, int) and not isinstance(logprobs, bool) and logprobs > 0


def generate_routes(service: Service) -> APIRouter:
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
        return json_response(await received(service, http, partial(_tokenized, service)))

    @router.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        """Text of token ids, special tokens shown."""
        return json_response(await received(service, http, partial(_detokenized, service)))

    return router


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRequests:
    """What a body asks for, in the words of the engine."""

    asked: DialectRequest
    answer_id: str
    requests: Sequence[GenerationRequest]
    grammar: GrammarSource | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A body's dialect, and what it asks for or why that is refused."""

    dialect: Dialect
    asked: AskedRequests | ParallmError


async def _answer(
    service: Service, http: Request, usual: Dialect, choose: Callable[[Mapping[str, Any]], Dialect]
) -> Response:
    """Errors have the form of the dialect; `usual` is that of bodies that are no JSON objects."""
    dialect = usual
    try:
        read = await received(service, http, partial(_read, service, choose))
        dialect = read.dialect
        if isinstance(read.asked, ParallmError):
            raise read.asked
        async with asyncio.timeout(read.asked.asked.timeout_seconds):
            return await _respond(service, http, read.asked)
    except TimeoutError:
        told = failure_of(DeadlineExceeded("the request was not done in the time that it gave itself (timeout)"))
    except ParallmError as error:
        told = failure_of(error)
    return error_response(told, dialect.refusal(told))


def _read(service: Service, choose: Callable[[Mapping[str, Any]], Dialect], text: bytes) -> Read:
    """Raises InvalidRequest where the dialect is unknown."""
    value = read_object(text)
    dialect = choose(value)
    try:
        asked = dialect.read(value if value.get("model") is not None else value | _usual_model(service, value))
        asked = replace(asked, body=with_lora_adapter(service, asked.body))
        answer_id = asked.body.request_id or f"gen-{uuid.uuid4().hex}"
        requests = requests_of(service, asked.body, answer_id)
        grammar = body_grammar(asked.body)
    except ParallmError as error:
        return Read(dialect=dialect, asked=error)
    return Read(
        dialect=dialect,
        asked=AskedRequests(asked=asked, answer_id=answer_id, requests=requests, grammar=grammar),
    )


async def _respond(service: Service, http: Request, read: AskedRequests) -> Response:
    asked, body = read.asked, read.asked.body
    requests = await constrained(read.requests, read.grammar, service, reasoning=None)
    # these answers say the ids and the mode themselves, at the places of their dialects
    plain = body.model_copy(update={"request_id": None, "step_id": None})
    num_running = service.engine.stats().num_running

    async def answer(routed: Sequence[GenerationRequest]) -> Response:
        context = replace(
            response_context(service, read.answer_id, plain, routed, logprobs=False), num_running=num_running
        )
        if body.stream and asked.stream is not None:
            return await respond_stream(service, http, asked.stream(context))
        return await respond_whole(service, http, asked.whole(context))

    return await on_a_side(service, requests, answer)


def _usual_model(service: Service, value: Mapping[str, Any]) -> dict[str, str]:
    """For bodies that name no `model`. Of several policies none is meant."""
    if value.get("lora_adapter") is not None:
        return {"model": BASE}
    return {"model": service.policies[0] if len(service.policies) == 1 else POLICY}


def _tokenized(service: Service, text: bytes) -> TokensOfText:
    tokenizer, max_context = service.tokenizer, service.engine.max_context
    value = read_object(text)
    check_items(value.get("messages"), "messages", "messages", max_context)
    body = checked(value, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", "prompt")
    if body.messages is not None:
        tokens = chat_prompt(body.as_chat(), tokenizer, max_context).tokens
    else:
        check_text(body.prompt or "", "prompt", tokenizer, max_context)
        parses = service.settings.parse_special if body.parse_special is None else body.parse_special
        tokens = tokenizer.encode(body.prompt or "", add_special=body.add_special_tokens, parse_special=parses)
    return TokensOfText(
        count=len(tokens),
        max_model_len=max_context,
        tokens=list(tokens),
        token_strs=[tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None,
    )


def _detokenized(service: Service, text: bytes) -> TextOfTokens:
    body = parse_body(text, DetokenizeBody)
    check_items(body.tokens, "tokens", "tokens", service.engine.max_context)
    return TextOfTokens(prompt=service.tokenizer.decode(body.tokens, special=True))
