"""Events that a slow consumer has let pile up, as few as can be."""

from collections.abc import Sequence
from itertools import chain

from parallm.types import TokenEvent


def joined(events: Sequence[TokenEvent]) -> list[TokenEvent]:
    """One event for each completion that `events` tell of, in the order of their first ones."""
    if len(events) == 1:
        return list(events)
    of_completions: dict[tuple[str, int], list[TokenEvent]] = {}
    for event in events:
        of_completions.setdefault((event.request_id, event.index), []).append(event)
    return [_one(parts) for parts in of_completions.values()]


def _one(parts: list[TokenEvent]) -> TokenEvent:
    if len(parts) == 1:
        return parts[0]
    return TokenEvent(
        request_id=parts[0].request_id,
        index=parts[0].index,
        tokens=tuple(chain.from_iterable(part.tokens for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        top_logprobs=tuple(chain.from_iterable(part.top_logprobs for part in parts)),
        text="".join(part.text for part in parts),
        completion=parts[-1].completion,
    )
