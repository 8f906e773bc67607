"""What a dialect of `POST /generate` is: a body in the words of one program, and answers in its shapes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel

from parallm.errors import InvalidRequest
from parallm.server.failures import Failure
from parallm.server.generation import ResponseBuilder, ResponseContext, StreamBuilder
from parallm.server.schemas import CompletionBody, Wire, checked

RESPONSE_FIELDS = ("collect_trajectory", "echo", "prompt_logprobs", "return_tokens_as_token_ids")
"""Fields of `/v1/completions` that change what an answer holds, which a dialect has to have a place for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectRequest:
    """A body of any dialect in one form: the fields of `POST /v1/completions`, which are checked there."""

    body: CompletionBody
    whole: Callable[[ResponseContext], ResponseBuilder]
    stream: Callable[[ResponseContext], StreamBuilder] | None = None
    """None: the dialect has no streams, and its `read` refuses them."""
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One program's way to ask for completions."""

    name: str
    read: Callable[[Mapping[str, Any]], DialectRequest]
    """A JSON object that names its `model`. Raises InvalidRequest."""
    refusal: Callable[[Failure], BaseModel]
    """The body of an error's answer."""


def completion_body(fields: Mapping[str, Any], *, has_prompt_logprobs: bool = False) -> CompletionBody:
    """The fields of `/v1/completions`, checked there. Raises InvalidRequest, also for what has no place in answers."""
    for name in RESPONSE_FIELDS:
        value = fields.get(name)
        if value is not None and value is not False and not (has_prompt_logprobs and name == "prompt_logprobs"):
            raise InvalidRequest(f"{name} is not answered here; send token ids to /v1/completions", name)
    return checked(fields, CompletionBody)


DEFAULT_MAX_TOKENS = 16
TEXT_ONLY = ("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind")
"""They shape text alone."""


class VllmErrorDetail(Wire):
    message: str
    type: str
    param: str | None
    code: int


class VllmError(Wire):
    error: VllmErrorDetail


def sampling_fields(params: Mapping[str, Any], *, has_text: bool) -> dict[str, Any]:
    """Fields of `/v1/completions`. What shapes text alone is left out where there will be none."""
    ignored = () if has_text else TEXT_ONLY
    return {"max_tokens": DEFAULT_MAX_TOKENS} | {name: value for name, value in params.items() if name not in ignored}


def refusal(failure: Failure) -> VllmError:
    told = failure.answer.error
    kind = f"{HTTPStatus(failure.status).phrase.title().replace(' ', '')}Error"
    return VllmError(error=VllmErrorDetail(message=told.message, type=kind, param=told.param, code=failure.status))
