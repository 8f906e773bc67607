"""Text to tokens and back: the chat template, and text that grows token by token."""

from collections.abc import Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from parallm.errors import InvalidRequest
from parallm.types import Message

REPLACEMENT = "\ufffd"  # what decoders give for a character whose bytes are not complete yet


class ChatTokenizer:
    """The model's tokenizer as the rest of the program needs it. Pure Python: usable on any thread."""

    def __init__(self, wrapper: TokenizerWrapper) -> None:
        self._tokenizer: Any = wrapper._tokenizer  # the Hugging Face tokenizer inside mlx-lm's wrapper
        self.eos_token_ids = frozenset(int(token) for token in wrapper.eos_token_ids)
        self.has_chat_template = bool(getattr(self._tokenizer, "chat_template", None))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text, with the special tokens that the tokenizer adds by itself."""
        return tuple(self._tokenizer.encode(text))

    def encode_more(self, text: str) -> tuple[int, ...]:
        """Token ids of text that follows other text: nothing is added to it."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of the chat template with the generation prompt.

        A model without a template gets the messages' contents joined by newlines. Raises InvalidRequest where the
        template refuses the messages.
        """
        text = self.render_chat(messages)
        return self.encode_more(text) if self.has_chat_template else self.encode(text)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The text that `encode_chat` encodes. Raises InvalidRequest where the template refuses the messages."""
        if not self.has_chat_template:
            return "\n".join(message.content for message in messages) + "\n"
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # templates are user-supplied programs: whatever they raise is about the messages
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", "messages") from error

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of `tokens`, without special tokens unless `special`."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def encode_answer(self, messages: Sequence[Message], answer: str) -> tuple[int, ...]:
        """Token ids of `answer` as the template writes it behind the generation prompt, with the token that ends it.

        Without a template, or where it changes what stands before the answer, the text itself and the end token.
        Raises InvalidRequest where the template refuses the messages.
        """
        prompt, whole = (self._rendered(messages, answer=text) for text in (None, answer))
        text = whole[len(prompt) :] if whole.startswith(prompt) else answer
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        ends = [place for place, token in enumerate(tokens) if token in self.eos_token_ids]
        return tuple(tokens[: ends[0] + 1]) if ends else (*tokens, self._tokenizer.eos_token_id)

    def _rendered(self, messages: Sequence[Message], answer: str | None) -> str:
        if not self.has_chat_template:
            return "" if answer is None else answer
        turns = [{"role": message.role, "content": message.content} for message in messages]
        turns += [] if answer is None else [{"role": "assistant", "content": answer}]
        try:
            rendered = self._tokenizer.apply_chat_template(turns, add_generation_prompt=answer is None, tokenize=False)
        except Exception as error:  # templates are user-supplied programs: whatever they raise is about the messages
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", "messages") from error
        return str(rendered)

    def token_text(self, token: int) -> str:
        """Text of one token, special tokens shown."""
        return str(self._tokenizer.decode([token]))


class GrowingText:
    """Text of a token sequence that grows; decodes only from the last safe place, so cost per token is bounded."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._safe = 0  # tokens before this are in `text`
        self._context = 0  # decoding starts here: a tokenizer may write a token differently at the start of a text
        self.text = ""

    def add(self, token: int) -> None:
        """Append a token; `text` grows by the characters that are complete."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._context : self._safe])
        now = self._tokenizer.decode(self._tokens[self._context :])
        if len(now) > len(before) and not now.endswith(REPLACEMENT):
            self.text += now[len(before) :]
            self._context, self._safe = self._safe, len(self._tokens)

    def finish(self) -> None:
        """Take incomplete characters over as they are."""
        before = self._tokenizer.decode(self._tokens[self._context : self._safe])
        self.text += self._tokenizer.decode(self._tokens[self._context :])[len(before) :]
        self._context = self._safe = len(self._tokens)
