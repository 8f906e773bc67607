"""Wire types of `POST /tokenize` and `POST /detokenize`, which have vLLM's forms."""

from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from parallm.server.schemas import ChatMessage, Wire, is_tokens


def read_tokens(value: object) -> list[int]:
    if not isinstance(value, list) or not is_tokens(value):
        raise ValueError("should be a list of token ids")
    return value


class TokenizeBody(Wire):
    """A text, or the messages of a chat with the generation prompt behind them."""

    model: str | None = None
    """Accepted and unused, as in `DetokenizeBody`: all adapters have the tokenizer of the base."""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    """Of a text; a chat template writes its own."""
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool = False


class TokensOfText(Wire):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(Wire):
    model: str | None = None
    tokens: Annotated[list[int], PlainValidator(read_tokens)]


class TextOfTokens(Wire):
    prompt: str
