"""What answers say of the prompt itself: log-probs of its tokens in vLLM's form, and its echo before a completion."""

from collections.abc import Sequence

from parallm.server.answer_schemas import CompletionLogprobs, RankedLogprob
from parallm.server.openai.logprobs import completion_logprobs, finite
from parallm.server.service import Tokenizer, TokenTexts
from parallm.types import Completion, PromptLogprob, TokenEvent

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
