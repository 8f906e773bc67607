"""One generation in progress, and the prompt that several share. Changed by the engine, on the device thread."""

import math
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from parallm.engine.detokenizer import Detokenizer
from parallm.engine.kv.shapes import allocated
from parallm.engine.sampling.prompt_logprobs import PromptLogprobScorer
from parallm.model.adapters.adapter import Adapter
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    PromptLogprob,
    TokenEvent,
    TokenMask,
    TopLogprob,
    WeightSpan,
)

SortKey = tuple[float, int]
"""Priority and number of a request: the least is computed first, and gives up its room last."""
MIN_SORT_KEY: SortKey = (-math.inf, 0)


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillJob:
    """A request on its way to rows: computed in chunks, then forked into one row per completion.

    Or a row that was preempted on its way back: its tokens so far are computed behind its prompt.
    """

    request: GenerationRequest
    tokens: tuple[int, ...]
    """To be computed."""
    waiting: list["Sequence"]
    """Members that have no row yet: all of them until every chunk is computed, with the same version."""
    sort_key: SortKey
    """Prompts are computed in this order."""
    cache: list[Any] = field(default_factory=list)
    """Made when the first chunk is computed; prompts that are computed together share it."""
    cache_row: int = 0
    """Which row of the cache it is."""
    num_bytes: int = 0
    """What is counted for its cache, begun or not, from when it is admitted; 0 before."""
    num_computed: int = 0
    logits_V: mx.array | None = None
    """Logits after the last token, once all chunks are done."""
    scores: PromptLogprobScorer | None = None
    """Where log-probs of the prompt are asked for."""

    @classmethod
    def of(cls, members: list["Sequence"]) -> "PrefillJob":
        """What `members` of one request, all new or a single preempted one, need computed."""
        first = members[0]
        tokens = (*first.request.prompt_tokens, *first.tokens)
        made = cls(request=first.request, tokens=tokens, waiting=members, sort_key=first.sort_key)
        made.restart()
        return made

    @property
    def is_computed(self) -> bool:
        return self.logits_V is not None

    @property
    def num_allocated(self) -> int:
        """Positions of its cache."""
        return allocated(len(self.tokens))

    def restart(self) -> None:
        """Forget what was computed, and give its memory back."""
        self.num_bytes, self.cache, self.cache_row, self.num_computed, self.logits_V = 0, [], 0, 0, None
        asks = self.request.needs_whole_prompt and self.waiting[0].prompt_logprobs is None
        self.scores = PromptLogprobScorer(sampling=self.request.sampling) if asks else None

    def segment(self) -> tuple[int, Adapter | None]:
        """Where the tokens that one version computes end from here on, and that version."""
        segments = self.waiting[0].segments()
        return next(found for found in segments if found[0] > self.num_computed)


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One completion of a request, from its first token to its last."""

    request: GenerationRequest
    index: int
    seed: int
    adapter: Adapter | None
    """That the next forward uses; changes only where `request.switches_in_flight`."""
    streams: bool
    arrival: int = 0
    """Number of its request, in the order in which the engine got them."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[TopLogprob, ...]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    adapter_starts: list[tuple[Adapter | None, int]] = field(default_factory=list)
    """(adapter, first token that it sampled), in order."""
    num_launched: int = 0
    """Tokens whose step was launched: those in `tokens`, and those of steps not read yet."""
    num_cached_prompt_tokens: int = 0
    """Prompt tokens that were known when it began, and not computed."""
    is_broken: bool = False
    """A log-probability was NaN: what the model computes for it is of no use, and neither are its keys and values."""
    has_left: bool = False
    """It ended or was aborted; what a step in flight samples for it is dropped."""
    prompt_logprobs: tuple[PromptLogprob | None, ...] | None = None
    """Once the prompt is computed, where they are asked for."""
    allowed: bytes | None = None
    """Bits of the tokens that its grammar allows next; None: all of them."""
    num_drafted: int = 0
    """Tokens that were fed as drafts, see `speculation.py`."""
    num_accepted: int = 0
    """Of these, those that were what it sampled."""
    _mask: TokenMask | None = None
    _ends: frozenset[int] | None = None  # the tokens that end it, once it has sampled one
    _limit: int | None = None  # of its tokens, once asked for
    _text: Detokenizer = field(default_factory=Detokenizer)
    _num_emitted: int = 0  # of its tokens, by events or because nobody listens

    @property
    def sort_key(self) -> SortKey:
        return (self.request.priority, self.arrival)

    @property
    def num_cached(self) -> int:
        """Positions in the cache behind the last launched step: the prompt and all launched tokens but the newest."""
        return len(self.request.prompt_tokens) + self.num_launched - 1

    @property
    def num_reserved(self) -> int:
        """Positions that its slot has for the coming step, one of which is free for a step that computes it along."""
        return self.num_cached + 2

    @property
    def end(self) -> int:
        """Positions that it needs at most."""
        return len(self.request.prompt_tokens) + self.request.sampling.max_tokens + 1

    def segments(self) -> list[tuple[int, Adapter | None]]:
        """(end, adapter) of the positions that each version computes, in order: those it computed, then the newest.

        The version that samples a token has computed the position before it, so a row that switched gets the keys and
        values again that it had.
        """
        num_prompt = len(self.request.prompt_tokens)
        ends = [num_prompt + start - 1 for _, start in self.adapter_starts[1:]]
        if self.adapter_starts:
            ends.append(num_prompt + len(self.tokens) - 1)
        known = [(end, adapter) for end, (adapter, _) in zip(ends, self.adapter_starts, strict=True)]
        last = (num_prompt + len(self.tokens), self.adapter)
        return [*known[:-1], last] if known and known[-1][1] is self.adapter else [*known, last]

    def reuses(self, num_tokens: int) -> None:
        """Note how many tokens were known when its prompt was computed."""
        if not self.tokens:
            self.num_cached_prompt_tokens = num_tokens

    def restart(self) -> None:
        """Go on as one that waits: it keeps its tokens and is computed again."""
        self.has_left, self.num_launched = False, len(self.tokens)

    def begin_grammar(self) -> bool:
        """Ask the grammar, if there is one, for the first token's mask; False where it allows nothing."""
        grammar = self.request.sampling.grammar
        if grammar is None:
            return True
        self._mask = grammar.start()
        self.allowed = self._mask.allowed()
        return any(self.allowed)

    def end_unsampled(self) -> None:
        """End a completion of no tokens, whose prompt is computed."""
        self.adapter_starts.append((self.adapter, 0))
        self.finish_reason = "length"

    def is_launched_whole(self, max_context: int) -> bool:
        """Whether the newest launched token is the last one in any case, whatever it will be."""
        return self._fills(self.num_launched, max_context)

    @property
    def may_be_broken(self) -> bool:
        """Whether its keys and values may hold NaN: known, or not known because it goes before a step was read."""
        return self.is_broken or (self.finish_reason is None and self.num_launched > len(self.tokens))

    @property
    def num_unemitted(self) -> int:
        """Tokens that no event has been made of, nor been asked for."""
        return len(self.tokens) - self._num_emitted

    def num_left(self, max_context: int) -> int:
        """Tokens that it may have beyond those that are launched."""
        return self._most(max_context) - self.num_launched

    def append(
        self, token: int, logprob: float, tops: Ordered[TopLogprob], tokenizer: ChatTokenizer, max_context: int
    ) -> None:
        """Take a sampled token; sets `finish_reason` when it ends the sequence."""
        sampling = self.request.sampling
        if self._ends is None:
            eos = () if sampling.ignore_eos else tokenizer.eos_token_ids
            self._ends = frozenset((*sampling.stop_token_ids, *eos))
        if not self.adapter_starts or self.adapter_starts[-1][0] is not self.adapter:
            self.adapter_starts.append((self.adapter, len(self.tokens)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.top_logprobs.append(tuple(tops[: sampling.top_logprobs]) if tops else ())
        if math.isnan(logprob):
            self.is_broken, self.finish_reason = True, "abort"
            return
        is_end = token in self._ends
        if not is_end and (self.streams or sampling.stop):
            stops = sampling.stop if len(self.tokens) >= sampling.min_tokens else ()
            self._text.add(token, tokenizer, stops)
        if is_end or self._text.stop_at is not None:
            self.finish_reason = "stop"
        elif self._fills(len(self.tokens), max_context):
            self.finish_reason = "length"
        elif self._mask is not None:
            self._mask.accept(token)
            self.allowed = self._mask.allowed()
            if not any(self.allowed):
                self.finish_reason = "stop"

    def event(self, tokenizer: ChatTokenizer) -> TokenEvent | None:
        """What the last step added, or None where nobody listens before the end."""
        new, self._num_emitted = slice(self._num_emitted, None), len(self.tokens)
        if not self.streams and self.finish_reason is None:
            return None
        completion = self._completion(tokenizer) if self.finish_reason else None
        return TokenEvent(
            request_id=self.request.request_id,
            index=self.index,
            tokens=tuple(self.tokens[new]),
            logprobs=tuple(self.logprobs[new]),
            top_logprobs=tuple(self.top_logprobs[new]),
            text=self._text.unshown(completion.text if completion else self._text.certain(self.request.sampling.stop)),
            completion=completion,
        )

    def aborted(self, tokenizer: ChatTokenizer) -> TokenEvent:
        """End it here; the event holds all that it has."""
        self.finish_reason = "abort"
        completion = self._completion(tokenizer)
        return TokenEvent(
            request_id=self.request.request_id,
            index=self.index,
            tokens=(),
            logprobs=(),
            top_logprobs=(),
            text=self._text.unshown(completion.text),
            completion=completion,
        )

    def _fills(self, num_tokens: int, max_context: int) -> bool:
        return num_tokens >= self._most(max_context)

    def _most(self, max_context: int) -> int:
        """Tokens that it may have."""
        if self._limit is None:
            self._limit = min(self.request.sampling.max_tokens, max_context - len(self.request.prompt_tokens))
        return self._limit

    def _completion(self, tokenizer: ChatTokenizer) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            request_id=self.request.request_id,
            index=self.index,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            top_logprobs=tuple(self.top_logprobs),
            text=self._final_text(tokenizer),
            finish_reason=self.finish_reason,
            weight_versions=self._weight_versions(),
            prompt_logprobs=self.prompt_logprobs,
            num_cached_prompt_tokens=self.num_cached_prompt_tokens,
            num_draft_tokens=self.num_drafted,
            num_accepted_tokens=self.num_accepted,
        )

    def _weight_versions(self) -> tuple[WeightSpan, ...]:
        ends = [*(start for _, start in self.adapter_starts[1:]), len(self.tokens)]
        return tuple(
            WeightSpan(version=adapter.version if adapter else 0, start=start, end=end)
            for (adapter, start), end in zip(self.adapter_starts, ends, strict=False)
        )

    def _final_text(self, tokenizer: ChatTokenizer) -> str:
        if self._text.has_begun:
            return self._text.final()
        ends = (*self.request.sampling.stop_token_ids, *tokenizer.eos_token_ids)
        is_ended = self.finish_reason == "stop" and bool(self.tokens) and self.tokens[-1] in ends
        return tokenizer.decode(self.tokens[:-1] if is_ended else self.tokens)
