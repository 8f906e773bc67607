"""Wire types of `POST /v1/rewards/score`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from parallm.server.openai.chat_schemas import ChatMessage
from parallm.server.schemas import FIRST_FAULT, Wire

Text = Annotated[str, Field(min_length=1)]


def read_texts(value: object) -> object:
    return [value] if isinstance(value, str) else value


Texts = Annotated[
    list[Text], Field(min_length=1), FIRST_FAULT, BeforeValidator(read_texts, json_schema_input_type=str | list[str])
]


class ScoreBody(Wire):
    """Whole texts as `input`, or completions of a `prompt` or of `messages`; without completions the messages end with
    the assistant's, which is scored."""

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Name of a reward model; without one the only model."""
    input: Texts | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    completions: Texts | None = None


class ScoreEntry(Wire):
    index: int
    object: Literal["score"]
    score: float


class ScoreUsage(Wire):
    prompt_tokens: int
    total_tokens: int


class ScoreAnswer(Wire):
    object: Literal["list"]
    model: str
    data: list[ScoreEntry]
    usage: ScoreUsage
