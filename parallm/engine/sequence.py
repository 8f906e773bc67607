"""One completion in progress, and the prefill job that the completions of a request share.

The engine creates and changes both, on the device thread only.
"""

import math
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from parallm.engine.detokenizer import Detokenizer
from parallm.engine.kv.block_pool import BlockTable
from parallm.engine.kv.shapes import allocated
from parallm.engine.sampling.sampler import PromptLogprobScorer
from parallm.errors import InvalidRequest
from parallm.model.adapters.adapter import Adapter
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.seeds import mix
from parallm.types import (
    BASE,
    Completion,
    EngineRow,
    FinishReason,
    GenerationRequest,
    PromptLogprob,
    TokenEvent,
    TokenMask,
    TopLogprob,
    WeightSpan,
)

SortKey = tuple[float, int]
"""Priority and arrival number of a request: the smallest runs first and is preempted last."""
MIN_SORT_KEY: SortKey = (-math.inf, 0)


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillJob:
    """A prompt to compute in chunks, or prompt and tokens of a preempted sequence; afterwards its sequences decode."""

    request: GenerationRequest
    tokens: tuple[int, ...]
    """Tokens to compute."""
    sequences: list["Sequence"]
    """Sequences that do not decode yet; all of them until the job is computed, with the same adapter version."""
    sort_key: SortKey
    cache: list[Any] = field(default_factory=list)
    """Created with the first chunk; jobs that are computed together share it."""
    cache_row: int = 0
    """Row of this job in the cache."""
    table: BlockTable | None = None
    """In place of a cache: pages for all its tokens, from admission on."""
    is_last_page_taken: bool = False
    """A sequence writes into the last page, after the prompt's end, so that others take a copy."""
    num_bytes: int = 0
    """Bytes accounted for its cache from admission on; 0 before."""
    num_computed: int = 0
    logits_V: mx.array | None = None
    """Logits after the last token, once the job is computed."""
    scorer: PromptLogprobScorer | None = None
    """Set where the request asks for log-probs of the prompt."""

    @classmethod
    def of(cls, sequences: list["Sequence"]) -> "PrefillJob":
        """The job of all new sequences of one request, or of a single preempted one."""
        first = sequences[0]
        tokens = (*first.request.prompt_tokens, *first.tokens)
        job = cls(request=first.request, tokens=tokens, sequences=sequences, sort_key=first.sort_key)
        job.restart()
        return job

    @property
    def is_computed(self) -> bool:
        return self.logits_V is not None

    @property
    def num_allocated(self) -> int:
        """Positions of its cache."""
        return allocated(len(self.tokens))

    def restart(self) -> None:
        """Drop what was computed, and its memory."""
        self.num_bytes, self.num_computed, self.logits_V = 0, 0, None
        self.cache, self.cache_row, self.table, self.is_last_page_taken = [], 0, None, False
        sampling = self.request.sampling
        needs_scores = sampling.prompt_logprobs is not None and self.sequences[0].prompt_logprobs is None
        self.scorer = PromptLogprobScorer(sampling=sampling) if needs_scores else None

    def segment(self) -> tuple[int, Adapter | None]:
        """End and adapter of the segment that holds the next token to compute; see `Sequence.segments`."""
        return next(segment for segment in self.sequences[0].segments() if segment[0] > self.num_computed)


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One completion of a request, from its first token to its last."""

    request: GenerationRequest
    index: int
    seed: int
    adapter: Adapter | None
    """Adapter of the next forward; changes only where `request.switches_in_flight`."""
    is_streaming: bool
    max_tokens: int
    """Tokens that it may sample."""
    began: float = field(default_factory=time.monotonic)
    arrival: int = 0
    """Number of its request, in the order of arrival."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[TopLogprob, ...]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    adapter_starts: list[tuple[Adapter | None, int]] = field(default_factory=list)
    """(adapter, first token that it sampled), in order."""
    num_launched: int = 0
    """`tokens`, and the tokens of steps that are in flight."""
    num_cached_prompt_tokens: int = 0
    """Prompt tokens that came from the prefix cache when it began."""
    is_broken: bool = False
    """A log-probability was NaN, so its keys and values may be NaN, too."""
    has_left: bool = False
    """It ended or was aborted; a step in flight may still sample for it, and that is dropped."""
    prompt_logprobs: tuple[PromptLogprob | None, ...] | None = None
    """Set once the prompt is computed, where the request asks for them."""
    allowed: bytes | None = None
    """Bits of the tokens that its grammar allows next; None: all tokens."""
    num_drafted: int = 0
    """Tokens that were fed as drafts."""
    num_accepted: int = 0
    """Drafts that equalled the sampled token."""
    _mask: TokenMask | None = None
    _end_tokens: frozenset[int] | None = None  # set with the first sampled token
    _detokenizer: Detokenizer | None = None  # a completion that is only read at its end needs none
    _num_emitted: int = 0  # tokens that events have covered
    _first_cached: int = field(init=False)  # cache positions after the first launched step

    def __post_init__(self) -> None:
        self._first_cached = len(self.request.prompt_tokens)

    @property
    def sort_key(self) -> SortKey:
        return (self.request.priority, self.arrival)

    @property
    def num_cached(self) -> int:
        """Cache positions after the last launched step: the prompt and all launched tokens but the newest."""
        return self._first_cached + self.num_launched - 1

    @property
    def num_reserved(self) -> int:
        """Positions that its slot needs: for the next step, and one that a step writes in which it is a filler."""
        return self.num_cached + 2

    @property
    def max_positions(self) -> int:
        return len(self.request.prompt_tokens) + self.request.sampling.max_tokens + 1

    def row(self, *, is_running: bool) -> EngineRow:
        """Return what people see of it."""
        adapter = self.adapter
        return EngineRow(
            request_id=self.request.request_id,
            index=self.index,
            traffic=self.request.traffic,
            model=BASE if adapter is None else f"{adapter.name}@{adapter.version}",
            is_running=is_running,
            num_prompt_tokens=len(self.request.prompt_tokens),
            num_sampled=len(self.tokens),
            max_tokens=self.max_tokens,
            seconds=time.monotonic() - self.began,
        )

    def segments(self) -> list[tuple[int, Adapter | None]]:
        """(end, adapter) of the positions that each adapter version computes, in order.

        The version that samples a token has computed the position before it, so a sequence that switched versions and
        was preempted gets the same keys and values again.
        """
        num_prompt = len(self.request.prompt_tokens)
        ends = [num_prompt + start - 1 for _, start in self.adapter_starts[1:]]
        if self.adapter_starts:
            ends.append(num_prompt + len(self.tokens) - 1)
        segments = [(end, adapter) for end, (adapter, _) in zip(ends, self.adapter_starts, strict=True)]
        if segments and segments[-1][1] is self.adapter:
            segments.pop()
        return [*segments, (num_prompt + len(self.tokens), self.adapter)]

    def restart(self) -> None:
        """Wait again after a preemption: the tokens stay, their keys and values are computed again."""
        self.has_left, self.num_launched = False, len(self.tokens)

    def begin_grammar(self) -> bool:
        """Get the first token's mask from the grammar, if there is one; False where it allows no token."""
        grammar = self.request.sampling.grammar
        if grammar is None:
            return True
        self._mask = grammar.start()
        self.allowed = self._mask.allowed()
        return any(self.allowed)

    def end_unsampled(self) -> None:
        """End a completion without tokens, whose prompt is computed."""
        self.adapter_starts.append((self.adapter, 0))
        self.finish_reason = "length"

    @property
    def num_left(self) -> int:
        """Tokens that it may have beyond the launched ones."""
        return self.max_tokens - self.num_launched

    @property
    def may_be_broken(self) -> bool:
        """Whether its keys and values may hold NaN: known, or unknown because a step in flight was not read."""
        return self.is_broken or (self.finish_reason is None and self.num_launched > len(self.tokens))

    def append(self, token: int, logprob: float, tops: tuple[TopLogprob, ...], tokenizer: ChatTokenizer) -> None:
        """Take a sampled token; sets `finish_reason` when it ends the sequence."""
        tokens, starts, sampling = self.tokens, self.adapter_starts, self.request.sampling
        if self._end_tokens is None:
            eos = () if sampling.ignore_eos else tokenizer.eos_token_ids
            self._end_tokens = frozenset((*sampling.stop_token_ids, *eos))
        if not starts or starts[-1][0] is not self.adapter:
            starts.append((self.adapter, len(tokens)))
        tokens.append(token)
        self.logprobs.append(logprob)
        self.top_logprobs.append(tops[: sampling.top_logprobs] if tops else ())
        if math.isnan(logprob):
            self.is_broken, self.finish_reason = True, "abort"
        elif token in self._end_tokens or self._has_stopped(token, tokenizer):
            self.finish_reason = "stop"
        elif len(tokens) >= self.max_tokens:
            self.finish_reason = "length"
        elif self._mask is not None:
            self._mask.accept(token)
            self.allowed = self._mask.allowed()
            if not any(self.allowed):
                self.finish_reason = "stop"

    def _has_stopped(self, token: int, tokenizer: ChatTokenizer) -> bool:
        """Whether a stop string is part of the text with this token."""
        sampling = self.request.sampling
        if not sampling.stop:
            return False
        if self._detokenizer is None:
            self._detokenizer = Detokenizer(tokenizer)
        self._detokenizer.add((token,), sampling.stop if len(self.tokens) >= sampling.min_tokens else ())
        return self._detokenizer.stop_at is not None

    @property
    def may_be_held(self) -> bool:
        """Whether its next event may come later, with more tokens: it is neither the first nor the last."""
        return self._num_emitted > 0 and self.finish_reason is None

    @property
    def has_event(self) -> bool:
        """Whether its tokens are of interest: not before the end of a completion that does not stream."""
        return self.is_streaming or self.finish_reason is not None

    def event(self, tokenizer: ChatTokenizer) -> TokenEvent:
        """Tokens and text since the last event, of which there is one if `has_event`."""
        if self.is_streaming and not self.request.sampling.stop:
            self._detokenize(tokenizer)
        new, self._num_emitted = slice(self._num_emitted, None), len(self.tokens)
        completion = self._completion(tokenizer, self.finish_reason) if self.finish_reason else None
        text = completion.text if completion else ""
        if self.is_streaming and self._detokenizer is not None:
            so_far = text if completion else self._detokenizer.certain(self.request.sampling.stop)
            text = self._detokenizer.unshown(so_far)
        return TokenEvent(
            request_id=self.request.request_id,
            index=self.index,
            tokens=tuple(self.tokens[new]),
            logprobs=tuple(self.logprobs[new]),
            top_logprobs=tuple(self.top_logprobs[new]),
            text=text,
            completion=completion,
        )

    def _detokenize(self, tokenizer: ChatTokenizer) -> None:
        """Add the tokens since the last event to the text, all at once."""
        if self._detokenizer is None:
            self._detokenizer = Detokenizer(tokenizer)
        end = len(self.tokens) - self._has_end_token(tokenizer)
        self._detokenizer.add(self.tokens[self._num_emitted : end])

    def _completion(self, tokenizer: ChatTokenizer, finish_reason: FinishReason) -> Completion:
        return Completion(
            request_id=self.request.request_id,
            index=self.index,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            top_logprobs=tuple(self.top_logprobs),
            text=self._final_text(tokenizer),
            finish_reason=finish_reason,
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
        if self._detokenizer is not None:
            return self._detokenizer.final()
        return tokenizer.decode(self.tokens[: len(self.tokens) - self._has_end_token(tokenizer)])

    def _has_end_token(self, tokenizer: ChatTokenizer) -> bool:
        """Whether it has ended with a token that is no part of its text."""
        if self.finish_reason != "stop" or not self.tokens:
            return False
        return self.tokens[-1] in (*self.request.sampling.stop_token_ids, *tokenizer.eos_token_ids)


def make_sequences(
    request: GenerationRequest, adapter: Adapter | None, *, is_streaming: bool, arrival: int, max_context: int
) -> list[Sequence]:
    """The `n` sequences of a new request. Raises InvalidRequest for a grammar that allows no token."""
    seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
    max_tokens = min(request.sampling.max_tokens, max_context - len(request.prompt_tokens))
    sequences = [
        Sequence(
            request=request,
            index=index,
            seed=mix(seed, index),
            adapter=adapter,
            is_streaming=is_streaming,
            max_tokens=max_tokens,
            arrival=arrival,
        )
        for index in range(request.n)
    ]
    if not all(sequence.begin_grammar() for sequence in sequences):
        raise InvalidRequest("the grammar allows no token to begin with", "grammar")
    return sequences
