"""Log-probs in the wire forms: parallel lists for completions, one entry per token for chats, vLLM's for prompts."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

from parallm.server.interfaces import TokenTexts
from parallm.server.openai.chat_schemas import ChatLogprobs, TokenLogprob, TopTokenLogprob
from parallm.server.openai.completion_schemas import CompletionLogprobs, RankedLogprob
from parallm.types import Completion, PromptLogprob, TokenEvent, TopLogprob

IMPOSSIBLE = -9999.0  # JSON has no -inf; this is what OpenAI's servers send for "very unlikely"
PromptLogprobs: TypeAlias = list[dict[str, RankedLogprob] | None]
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


def prompt_logprobs(logprobs: Sequence[PromptLogprob | None], count: int, tokenizer: TokenTexts) -> PromptLogprobs:
    """Return the log-probs by position and token id, null for the first position.

    Each position has the prompt's token and the `count` most likely ones.
    """
    return [None if logprob is None else _ranked(logprob, count, tokenizer) for logprob in logprobs]


def echoed_logprobs(completion: Completion, first_token: int, count: int, tokenizer: TokenTexts) -> CompletionLogprobs:
    """Return log-probs of the prompt and then of the completion, as one text; null for the prompt's first token."""
    logprobs = [logprob for logprob in completion.prompt_logprobs or () if logprob is not None]
    first = tokenizer.token_text(first_token)
    prompt = TokenEvent(
        request_id=completion.request_id,
        index=completion.index,
        tokens=tuple(logprob.token for logprob in logprobs),
        logprobs=tuple(logprob.logprob for logprob in logprobs),
        top_logprobs=tuple(logprob.top[:count] for logprob in logprobs),
        text="",
    )
    parts = [completion_logprobs(prompt, tokenizer, len(first))]
    parts.append(completion_logprobs(completion, tokenizer, len(first) + sum(map(len, parts[0].tokens))))
    return CompletionLogprobs(
        tokens=[first, *(token for part in parts for token in part.tokens)],
        token_logprobs=[None, *(logprob for part in parts for logprob in part.token_logprobs)],
        top_logprobs=[None, *(top for part in parts for top in part.top_logprobs)],
        text_offset=[0, *(offset for part in parts for offset in part.text_offset)],
    )


class TokenNumbers:
    """Names tokens `token_id:5`, as vLLM does with `return_tokens_as_token_ids`."""

    def token_text(self, token: int) -> str:
        return f"token_id:{token}"


def _with_sampled(text: str, logprob: float, top: Sequence[TopLogprob], tokenizer: TokenTexts) -> dict[str, float]:
    """Return the most likely tokens and the sampled one, by text: the likeliest token of a text counts."""
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


def _ranked(logprob: PromptLogprob, count: int, tokenizer: TokenTexts) -> dict[str, RankedLogprob]:
    entries = [(logprob.token, logprob.logprob, logprob.rank)]
    entries += [(top.token, top.logprob, rank) for rank, top in enumerate(logprob.top[:count], start=1)]
    ranked: dict[str, RankedLogprob] = {}
    for token, value, rank in entries:
        entry = RankedLogprob(logprob=finite(value), rank=rank, decoded_token=tokenizer.token_text(token))
        ranked.setdefault(str(token), entry)
    return ranked
