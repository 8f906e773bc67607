"""Log-probs in the wire forms: parallel lists for completions, one entry per token for chats, vLLM's for prompts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeAlias

from parallm.server.openai.chat_schemas import ChatLogprobs, TokenLogprob, TopTokenLogprob
from parallm.server.openai.completion_schemas import CompletionLogprobs, RankedLogprob
from parallm.types import Completion, PromptLogprob, TokenEvent, TopLogprob

IMPOSSIBLE = -9999.0  # JSON has no -inf; this is what OpenAI's servers send for "very unlikely"
PromptLogprobs: TypeAlias = list[dict[str, RankedLogprob] | None]
TokenText: TypeAlias = Callable[[int], str]
REPLACEMENT = "\ufffd"  # a token that is part of a character has no text of its own


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def completion_logprobs(source: TokenEvent | Completion, token_text: TokenText, offset: int) -> CompletionLogprobs:
    """`offset` is the number of characters of all token texts before this one."""
    texts = [token_text(token) for token in source.tokens]
    logprobs = [finite(logprob) for logprob in source.logprobs]
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=list(logprobs),
        top_logprobs=[
            _with_sampled(text, logprob, top, token_text)
            for text, logprob, top in zip(texts, logprobs, _tops(source), strict=True)
        ],
        text_offset=list(accumulate(map(len, texts), initial=offset))[:-1],
    )


def echoed_logprobs(completion: Completion, first: int, count: int, token_text: TokenText) -> CompletionLogprobs:
    """Return log-probs of the prompt and then of the completion, as one text; null for the prompt's `first` token."""
    prompt = [logprob for logprob in completion.prompt_logprobs or () if logprob is not None]
    text = replace(
        completion,
        tokens=(*(logprob.token for logprob in prompt), *completion.tokens),
        logprobs=(*(logprob.logprob for logprob in prompt), *completion.logprobs),
        top_logprobs=(*(logprob.top[:count] for logprob in prompt), *_tops(completion)),
    )
    rest = completion_logprobs(text, token_text, len(token_text(first)))
    return CompletionLogprobs(
        tokens=[token_text(first), *rest.tokens],
        token_logprobs=[None, *rest.token_logprobs],
        top_logprobs=[None, *rest.top_logprobs],
        text_offset=[0, *rest.text_offset],
    )


def chat_logprobs(source: TokenEvent | Completion, token_text: TokenText) -> ChatLogprobs:
    content = []
    for token, logprob, top in zip(source.tokens, source.logprobs, _tops(source), strict=True):
        alternatives = [TopTokenLogprob(**_entry(item.token, item.logprob, token_text)) for item in top]
        content.append(TokenLogprob(**_entry(token, logprob, token_text), top_logprobs=alternatives))
    return ChatLogprobs(content=content)


def prompt_logprobs(logprobs: Sequence[PromptLogprob | None], count: int, token_text: TokenText) -> PromptLogprobs:
    """Return the log-probs by position and token id, null for the first position.

    Each position has the prompt's token and the `count` most likely ones.
    """
    return [None if logprob is None else _ranked(logprob, count, token_text) for logprob in logprobs]


def _tops(source: TokenEvent | Completion) -> tuple[tuple[TopLogprob, ...], ...]:
    return source.top_logprobs or ((),) * len(source.tokens)


def _with_sampled(text: str, logprob: float, top: Sequence[TopLogprob], token_text: TokenText) -> dict[str, float]:
    """Return the most likely tokens and the sampled one, by text: the likeliest token of a text counts."""
    entries: dict[str, float] = {}
    for item in top:
        entries.setdefault(token_text(item.token), finite(item.logprob))
    entries.setdefault(text, logprob)
    return entries


def _entry(token: int, logprob: float, token_text: TokenText) -> dict[str, Any]:
    text = token_text(token)
    return {"token": text, "logprob": finite(logprob), "bytes": None if REPLACEMENT in text else list(text.encode())}


def _ranked(logprob: PromptLogprob, count: int, token_text: TokenText) -> dict[str, RankedLogprob]:
    entries = [(logprob.token, logprob.logprob, logprob.rank)]
    entries += [(top.token, top.logprob, rank) for rank, top in enumerate(logprob.top[:count], start=1)]
    ranked: dict[str, RankedLogprob] = {}
    for token, value, rank in entries:
        ranked.setdefault(str(token), RankedLogprob(logprob=finite(value), rank=rank, decoded_token=token_text(token)))
    return ranked
