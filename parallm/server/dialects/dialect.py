"""What a dialect of `POST /generate` is: a body in the words of one program, and answers in its shapes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from parallm.errors import InvalidRequest
from parallm.server.answers import Answers, Head, WholeAnswers
from parallm.server.failures import Failure
from parallm.server.parse import checked
from parallm.server.schemas import CompletionBody

SHAPES = ("collect_trajectory", "echo", "prompt_logprobs", "return_tokens_as_token_ids")
"""Fields of `/v1/completions` that change what an answer holds, which a dialect has to have a place for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body of any dialect in one form: the fields of `POST /v1/completions`, which are checked there."""

    body: CompletionBody
    whole: Callable[[Head], WholeAnswers]
    stream: Callable[[Head], Answers] | None = None
    """None: the dialect has no streams, and its `read` refuses them."""
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One program's way to ask for completions."""

    name: str
    read: Callable[[Mapping[str, Any]], Asked]
    """A JSON object that names its `model`. Raises InvalidRequest."""
    refusal: Callable[[Failure], BaseModel]
    """The body of an error's answer."""


def completion_body(fields: Mapping[str, Any], *, has_prompt_logprobs: bool = False) -> CompletionBody:
    """The fields of `/v1/completions`, checked there. Raises InvalidRequest, also for what has no place in answers."""
    for name in SHAPES:
        value = fields.get(name)
        if value is not None and value is not False and not (has_prompt_logprobs and name == "prompt_logprobs"):
            raise InvalidRequest(f"{name} is not answered here; send token ids to /v1/completions", name)
    return checked(fields, CompletionBody)
