"""Tokens by their numbers: two tokens can have the same text, and some have none of their own."""

from collections.abc import Sequence

from parallm.server.service import Tokenizer
from parallm.types import Message


class TokenNumbers:
    """A tokenizer whose tokens are called `token_id:5`, as vLLM does with `return_tokens_as_token_ids`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def token_text(self, token: int) -> str:
        return f"token_id:{token}"

    def encode(self, text: str) -> tuple[int, ...]:
        return self._tokenizer.encode(text)

    def encode_more(self, text: str) -> tuple[int, ...]:
        return self._tokenizer.encode_more(text)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self._tokenizer.encode_chat(messages)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return self._tokenizer.decode(tokens, special=special)
