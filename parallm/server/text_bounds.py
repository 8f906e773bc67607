"""Bounds of the texts of a request: a text that cannot fit into the context is refused before it is encoded whole.

A tokenizer needs seconds and a gigabyte for 4 MB, only to find too many tokens.
"""

from collections.abc import Callable, Sequence

from parallm.errors import ContextTooLong
from parallm.server.service import Tokenizer

SETTING = "engine.max_context"
USUAL_CHARACTERS = 8
"""A token of a usual text has fewer. A text with more per token of the context is first encoded in pieces."""
PIECE = 4096
CERTAIN = 2
"""Pieces may have a few tokens more than the whole text, so that it is refused from twice the context on."""


def check_text(text: str, name: str, tokenizer: Tokenizer, max_context: int) -> None:
    """Raises ContextTooLong for a text that has more tokens than the context, at no cost for one of usual length."""
    check_texts([text], name, tokenizer, max_context)


def check_texts(texts: Sequence[str], name: str, tokenizer: Tokenizer, max_context: int) -> None:
    """As `check_text`, for texts that will be one prompt."""
    number = sum(map(len, texts))
    if number <= USUAL_CHARACTERS * max_context:
        return
    longest = tokenizer.max_token_length
    if number > longest * max_context:
        raise ContextTooLong(
            f"{name} has {number} characters and this model's maximum context length is {max_context} tokens, which "
            f"have at most {longest * max_context}; shorten it",
            name,
            setting=SETTING,
        )
    _check_pieces(texts, name, tokenizer.encode_more, max_context)


def check_items(items: object, what: str, name: str, max_context: int) -> None:
    """Raises ContextTooLong for a list of more token ids, or more messages, than the context has tokens."""
    if isinstance(items, list) and (number := len(items)) > max_context:
        raise ContextTooLong(
            f"{name} has {number} {what} and this model's maximum context length is {max_context} tokens; shorten it",
            name,
            setting=SETTING,
        )


def _check_pieces(texts: Sequence[str], name: str, encode: Callable[[str], Sequence[int]], max_context: int) -> None:
    num_tokens = 0
    for text in texts:
        for start in range(0, len(text), PIECE):
            num_tokens += len(encode(text[start : start + PIECE]))
            if num_tokens > CERTAIN * max_context:
                raise ContextTooLong(
                    f"{name} has more than {num_tokens} tokens and this model's maximum context length is "
                    f"{max_context}; shorten it",
                    name,
                    setting=SETTING,
                )
