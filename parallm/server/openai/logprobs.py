"""Log-probabilities in the two wire forms: parallel lists for completions, one entry per token for chats."""

import math
from collections.abc import Sequence
from itertools import accumulate

from parallm.server.answer_schemas import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopTokenLogprob
from parallm.server.service import TokenTexts
from parallm.types import Completion, TokenEvent, TopLogprob

IMPOSSIBLE = -9999.0  # JSON has no -inf; this is what OpenAI's servers send for "very unlikely"
REPLACEMENT = "\ufffd"  # a token that is part of a character has no text of its own


def completion_logprobs(source: TokenEvent | Completion, tokenizer: TokenTexts, offset: int) -> CompletionLogprobs:
    """`offset` is the number of characters of all token texts before this one."""
    texts = [tokenizer.token_text(token) for token in source.tokens]
    offsets = list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else []
    logprobs = [finite(logprob) for logprob in source.logprobs]
    tops = source.top_logprobs or ((),) * len(texts)
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=list(logprobs),
        top_logprobs=[
            _with_sampled(text, logprob, top, tokenizer)
            for text, logprob, top in zip(texts, logprobs, tops, strict=True)
        ],
        text_offset=offsets,
    )


def chat_logprobs(source: TokenEvent | Completion, tokenizer: TokenTexts) -> ChatLogprobs:
    tops = source.top_logprobs or ((),) * len(source.tokens)
    content = []
    for token, logprob, top in zip(source.tokens, source.logprobs, tops, strict=True):
        text = tokenizer.token_text(token)
        alternatives = [_top_entry(item, tokenizer) for item in top]
        content.append(TokenLogprob(token=text, logprob=finite(logprob), bytes=_bytes(text), top_logprobs=alternatives))
    return ChatLogprobs(content=content)


def _with_sampled(text: str, logprob: float, top: Sequence[TopLogprob], tokenizer: TokenTexts) -> dict[str, float]:
    """The most likely tokens and the sampled one. Of tokens with the same text the likeliest stays."""
    entries: dict[str, float] = {}
    for item in top:
        entries.setdefault(tokenizer.token_text(item.token), finite(item.logprob))
    entries.setdefault(text, logprob)
    return entries


def _top_entry(item: TopLogprob, tokenizer: TokenTexts) -> TopTokenLogprob:
    text = tokenizer.token_text(item.token)
    return TopTokenLogprob(token=text, logprob=finite(item.logprob), bytes=_bytes(text))


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def _bytes(text: str) -> list[int] | None:
    return None if REPLACEMENT in text else list(text.encode())
