"""What a dialect of `POST /generate` is: a body in the words of one program, and answers in its shapes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from parallm.server.answers import Answers, Head, WholeAnswers
from parallm.server.failures import Failure
from parallm.server.schemas import CompletionBody


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
