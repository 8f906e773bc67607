"""A dialect of `POST /generate`: how one program words a request, and the shape of the answers that it reads.

Each dialect turns its body into the fields of `/v1/completions`, so that limits, checks and refusals are the same.
`routes_generate.py` chooses the dialect of a body.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from operator import attrgetter
from typing import Any

from pydantic import BaseModel

from parallm.errors import InvalidRequest
from parallm.server.failures import Failure
from parallm.server.generation import ResponseBuilder, ResponseContext, StreamBuilder
from parallm.server.openai.completion_schemas import CompletionBody
from parallm.server.openai.logprobs import finite
from parallm.server.schemas import Wire, checked
from parallm.types import Completion

RESPONSE_FIELDS = ("collect_trajectory", "echo", "prompt_logprobs", "return_tokens_as_token_ids")
"""Fields of `/v1/completions` that change the answer, for which a dialect needs a place in its own."""
VLLM_MAX_TOKENS = 16
TEXT_FIELDS = ("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind")
"""vLLM's fields that shape the text alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectRequest:
    """A body of any dialect as the fields of `POST /v1/completions`, and the builders of its answers."""

    body: CompletionBody
    whole: Callable[[ResponseContext], ResponseBuilder]
    stream: Callable[[ResponseContext], StreamBuilder] | None = None
    """None: the dialect has no streams."""
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    name: str
    read: Callable[[Mapping[str, Any]], DialectRequest]
    """Reads a JSON object that names its `model`. Raises InvalidRequest."""
    refusal: Callable[[Failure], BaseModel] = attrgetter("answer")
    """Makes the body of an error's answer; OpenAI's form without it."""


class VllmErrorDetail(Wire):
    message: str
    type: str
    param: str | None
    code: int


class VllmError(Wire):
    error: VllmErrorDetail


def completion_body(fields: Mapping[str, Any], *, has_prompt_logprobs: bool = False) -> CompletionBody:
    """Check the fields as `/v1/completions` does. Raises InvalidRequest, also for what the answer has no place for."""
    for name in RESPONSE_FIELDS:
        value = fields.get(name)
        if value is not None and value is not False and not (has_prompt_logprobs and name == "prompt_logprobs"):
            raise InvalidRequest(f"{name} is not answered here; send token ids to /v1/completions", name)
    return checked(fields, CompletionBody)


def positions(completion: Completion) -> Iterator[dict[int, float]]:
    """Yield the log-probs of each position by token id: the sampled token, then the most likely ones."""
    tops = completion.top_logprobs or ((),) * len(completion.tokens)
    for token, logprob, top in zip(completion.tokens, completion.logprobs, tops, strict=True):
        others = {likely.token: finite(likely.logprob) for likely in top if likely.token != token}
        yield {token: finite(logprob)} | others


def vllm_sampling_fields(params: Mapping[str, Any], *, has_text: bool) -> dict[str, Any]:
    """Return vLLM's SamplingParams as fields of `/v1/completions`, without those of text where there is none."""
    ignored = () if has_text else TEXT_FIELDS
    return {"max_tokens": VLLM_MAX_TOKENS} | {name: value for name, value in params.items() if name not in ignored}


def vllm_refusal(failure: Failure) -> VllmError:
    error = failure.answer.error
    kind = f"{HTTPStatus(failure.status).phrase.title().replace(' ', '')}Error"
    return VllmError(error=VllmErrorDetail(message=error.message, type=kind, param=error.param, code=failure.status))
