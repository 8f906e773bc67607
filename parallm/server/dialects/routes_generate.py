"""`/generate` in five dialects and `/inference/v1/generate`, for rollout workers of other programs."""

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
from parallm.server.connection import error_response, received
from parallm.server.dialects.dialect import Dialect, DialectRequest
from parallm.server.dialects.native import NATIVE, VERSIONED
from parallm.server.dialects.sglang import SGLANG
from parallm.server.dialects.trl import TRL
from parallm.server.dialects.vllm import VLLM_LEGACY, VLLM_TOKENS
from parallm.server.failures import DeadlineExceeded, failure_of
from parallm.server.generation import ChunkStream, ResponseContext, respond
from parallm.server.openai.grammars import body_grammar, constrained
from parallm.server.openai.translate import completion_requests, with_lora_adapter
from parallm.server.schemas import read_object
from parallm.server.service import Service
from parallm.types import BASE, POLICY, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequests:
    """A body as requests to the engine."""

    asked: DialectRequest
    answer_id: str
    requests: Sequence[GenerationRequest]
    grammar: GrammarSource | None


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
        return await _answer(service, http, VLLM_TOKENS, lambda _: VLLM_TOKENS)

    return router


def dialect_of(value: Mapping[str, Any]) -> Dialect:
    """Return the dialect of a body by its keys; one that fits none is native, which names the field at fault."""
    if "prompts" in value:
        return TRL
    if value.keys() & {"input_ids", "text", "sampling_params"}:
        return SGLANG
    if isinstance(value.get("prompt"), dict):
        return VLLM_LEGACY
    logprobs = value.get("logprobs")
    has_logprobs = isinstance(logprobs, int) and not isinstance(logprobs, bool) and logprobs > 0
    if "policy_version" in value or has_logprobs:  # the native form has no place for them
        return VERSIONED
    return NATIVE


async def _answer(
    service: Service, http: Request, default: Dialect, choose: Callable[[Mapping[str, Any]], Dialect]
) -> Response:
    """Answer in the dialect of the body, also with errors; `default` is for bodies that are no JSON objects."""
    dialect = default
    try:
        dialect, parsed = await received(service, http, partial(_parse, service, choose))
        if isinstance(parsed, ParallmError):
            raise parsed
        async with asyncio.timeout(parsed.asked.timeout_seconds):
            return await _respond(service, http, parsed)
    except TimeoutError:
        failure = failure_of(DeadlineExceeded("the request was not done in the time that it gave itself (timeout)"))
    except ParallmError as error:
        failure = failure_of(error)
    return error_response(failure, dialect.refusal(failure))


def _parse(
    service: Service, choose: Callable[[Mapping[str, Any]], Dialect], text: bytes
) -> tuple[Dialect, EngineRequests | ParallmError]:
    """Return the dialect, and the requests or why they are refused. Raises InvalidRequest if no dialect is known."""
    value = read_object(text)
    dialect = choose(value)
    try:
        asked = dialect.read(value if value.get("model") is not None else value | _default_model(service, value))
        if asked.body.stream and asked.stream is None:
            raise InvalidRequest("this body gets no stream here; send its prompt to /v1/completions", "stream")
        asked = replace(asked, body=with_lora_adapter(asked.body, service))
        answer_id = asked.body.request_id or f"gen-{uuid.uuid4().hex}"
        requests = completion_requests(asked.body, answer_id, service)
        grammar = body_grammar(asked.body)
    except ParallmError as error:
        return dialect, error
    return dialect, EngineRequests(asked=asked, answer_id=answer_id, requests=requests, grammar=grammar)


async def _respond(service: Service, http: Request, parsed: EngineRequests) -> Response:
    asked, body = parsed.asked, parsed.asked.body
    requests = await constrained(parsed.requests, parsed.grammar, service, reasoning=None)
    context = ResponseContext(
        answer_id=parsed.answer_id,
        body=body,
        requests=requests,
        tokenizer=service.tokenizer,
        num_running=service.engine.stats().num_running,
    )
    if body.stream and asked.stream is not None:
        builder = asked.stream(context)
        return await respond(service, http, builder, ChunkStream(service, builder))
    return await respond(service, http, asked.whole(context))


def _default_model(service: Service, value: Mapping[str, Any]) -> dict[str, str]:
    """Return the model of a body that names none: the policy, or the base beside a `lora_adapter`."""
    if value.get("lora_adapter") is not None:
        return {"model": BASE}
    return {"model": service.policies[0] if len(service.policies) == 1 else POLICY}
