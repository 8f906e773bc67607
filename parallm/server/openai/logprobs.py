"""Log-probabilities in the two wire forms: parallel lists for completions, one entry per token for chats."""

import math
from collections.abc import Sequence
from itertools import accumulate

from parallm.server.schemas import ChatLogprobs, CompletionLogprobs, RankedLogprob, TokenLogprob, TopTokenLogprob
from parallm.server.service import Tokenizer, TokenTexts
from parallm.types import Completion, PromptLogprob, TokenEvent, TopLogprob

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


class TokenNumbers:
    """Calls tokens `token_id:5`, as vLLM does with `return_tokens_as_token_ids`."""

    def token_text(self, token: int) -> str:
        return f"token_id:{token}"


PromptLogprobs = list[dict[str, RankedLogprob] | None]


def prompt_logprobs(told: Sequence[PromptLogprob | None], most: int, tokenizer: TokenTexts) -> PromptLogprobs:
    """By position, and in it by token id: the prompt's token first, then the `most` likely ones; null for the first."""
    return [None if one is None else _ranked(one, most, tokenizer) for one in told]


def echoed_logprobs(completion: Completion, first_token: int, most: int, tokenizer: TokenTexts) -> CompletionLogprobs:
    """Those of the prompt and then those of the completion, as one text; null for the prompt's first token."""
    told = [one for one in completion.prompt_logprobs or () if one is not None]
    first = tokenizer.token_text(first_token)
    prompt = TokenEvent(
        request_id=completion.request_id,
        index=completion.index,
        tokens=tuple(one.token for one in told),
        logprobs=tuple(one.logprob for one in told),
        top_logprobs=tuple(one.top[:most] for one in told),
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


def prompt_text(prompt: str | Sequence[int], tokenizer: Tokenizer) -> str:
    """As it was sent; token ids as their text, special ones shown."""
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, special=True)


def _ranked(one: PromptLogprob, most: int, tokenizer: TokenTexts) -> dict[str, RankedLogprob]:
    entries = [(one.token, one.logprob, one.rank)]
    entries += [(top.token, top.logprob, place + 1) for place, top in enumerate(one.top[:most])]
    found: dict[str, RankedLogprob] = {}
    for token, logprob, rank in entries:
        ranked = RankedLogprob(logprob=finite(logprob), rank=rank, decoded_token=tokenizer.token_text(token))
        found.setdefault(str(token), ranked)
    return found
