"""Wire types of `POST /tokenize` and `POST /detokenize`, which have vLLM's forms."""

from typing import Annotated, Any

from pydantic import Field, PlainValidator

from parallm.server.openai.chat_schemas import MAX_TOOLS, ChatBody, ChatMessage, Tool
from parallm.server.schemas import Wire, is_tokens
from parallm.types import POLICY


def read_tokens(value: object) -> list[int]:
    if not isinstance(value, list) or not is_tokens(value):
        raise ValueError("should be a list of token ids")
    return value


CHAT_FIELDS = {"messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"}


class TokenizeBody(Wire):
    """A text, or a chat: the prompt that `/v1/chat/completions` makes of these fields."""

    model: str | None = None
    """Accepted and unused, as in `DetokenizeBody`: all adapters have the tokenizer of the base."""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    """Of a text; a chat template writes its own."""
    parse_special: bool | None = None
    """Of a text, as in `/v1/completions`."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False

    def as_chat(self) -> ChatBody:
        """For a body that has `messages`."""
        given = {name: getattr(self, name) for name in self.model_fields_set & CHAT_FIELDS}
        return ChatBody(model=self.model or POLICY, **given)


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
