"""`POST /tokenize` and `POST /detokenize` in vLLM's forms: wire types and routes."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, PlainValidator
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest
from parallm.server.connection import json_response, received
from parallm.server.openai.chat_schemas import MAX_TOOLS, ChatBody, ChatMessage, Tool
from parallm.server.openai.translate import chat_prompt
from parallm.server.request_limits import check_items, check_text
from parallm.server.schemas import Wire, checked, is_tokens, parse_body, read_object
from parallm.server.service import Service
from parallm.types import POLICY

CHAT_FIELDS = {"messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"}


def read_token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not is_tokens(value):
        raise ValueError("should be a list of token ids")
    return value


class TokenizeBody(Wire):
    """A text, or a chat: the prompt that `/v1/chat/completions` makes of these fields."""

    model: str | None = None
    """Accepted and unused, as in `DetokenizeBody`: all adapters have the tokenizer of the base."""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    """Special tokens around a text; a chat template writes its own."""
    parse_special: bool | None = None
    """Special tokens inside a text, as in `/v1/completions`."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False

    def as_chat(self) -> ChatBody:
        """Return the chat of a body that has `messages`."""
        fields = {name: getattr(self, name) for name in self.model_fields_set & CHAT_FIELDS}
        return ChatBody(model=self.model or POLICY, **fields)


class TokensOfText(Wire):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(Wire):
    model: str | None = None
    tokens: Annotated[list[int], PlainValidator(read_token_ids)]


class TextOfTokens(Wire):
    prompt: str


def tokenize_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        """Token ids of a text, or of a chat with the model's template."""
        return json_response(await received(service, http, partial(_tokenized, service)))

    @router.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        """Text of token ids, special tokens shown."""
        return json_response(await received(service, http, partial(_detokenized, service)))

    return router


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
