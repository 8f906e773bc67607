"""Answers of SGLang's `/generate`: one object, or a list of them for several; chunks of a stream are cumulative."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import RootModel

from parallm.server.answer_schemas import Usage, WeightVersions
from parallm.server.answers import Head, version_of, weight_versions
from parallm.server.openai.logprobs import finite
from parallm.server.schemas import CompletionBody, Wire
from parallm.types import Completion, GenerationRequest, TokenEvent, TopLogprob

Logprob = tuple[float | None, int, str | None]
"""Log-probability (null for the first token of a prompt), token id, and its text if that was asked for."""


class FinishReason(Wire):
    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


class MetaInfo(Wire):
    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt; 0 until the completion has ended."""
    e2e_latency: float
    logprobs_mode: Literal["temperature"]
    step_id: int | str | None
    policy_version: int | None
    weight_version: str | None
    weight_versions: list[WeightVersions]
    input_token_logprobs: list[Logprob] | None = None
    input_top_logprobs: list[list[Logprob] | None] | None = None
    """The `top_logprobs_num` likeliest tokens beside each of `input_token_logprobs`; null for the prompt's first."""
    output_token_logprobs: list[Logprob] | None = None
    output_top_logprobs: list[list[Logprob]] | None = None


class SglangRow(Wire):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int


class SglangRows(RootModel[list[SglangRow]]):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the client asked to see."""

    is_batch: bool
    """Prompts came in a list, so answers do."""
    logprobs: bool
    prompt_from: int
    """First token of the prompt whose log-prob is told; -1: none."""
    texts_in_logprobs: bool
    special_tokens: bool
    stop: bool
    """Text goes on to the end of what has stopped it."""


@dataclass(slots=True)
class _Grown:
    """One choice of a stream so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[TopLogprob, ...]] = field(default_factory=list)


class SglangAnswers:
    """Remembers what it has streamed of each choice."""

    def __init__(self, head: Head, body: CompletionBody, shown: Shown) -> None:
        self.head = head
        self._body = body
        self._shown = shown
        self._began = time.perf_counter()
        self._grown: dict[int, _Grown] = {}

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> SglangRow | SglangRows:
        rows = [self._row(prompt, one) for prompt, group in enumerate(completions) for one in group]
        return SglangRows(rows) if self._shown.is_batch or len(rows) > 1 else rows[0]

    def opening(self, model: str) -> list[SglangRow]:
        return []

    def text_chunk(self, model: str, prompt: int, event: TokenEvent) -> SglangRow | None:
        index = self.head.choice_index(prompt, event.index)
        grown = self._grown.setdefault(index, _Grown())
        grown.text += event.text
        grown.tokens += event.tokens
        grown.logprobs += event.logprobs
        grown.tops += event.top_logprobs
        if event.completion is not None:  # told by the last chunk
            return None
        text = self.head.tokenizer.decode(grown.tokens, special=True) if self._shown.special_tokens else grown.text
        meta = self._meta(prompt, index, None, grown.tokens, grown.logprobs, grown.tops)
        return SglangRow(text=text, output_ids=grown.tokens, meta_info=meta, index=index)

    def final_chunk(self, model: str, prompt: int, completion: Completion) -> SglangRow:
        return self._row(prompt, completion)

    def usage_chunk(self, model: str, usage: Usage) -> SglangRow:
        raise AssertionError("SGLang's bodies have no stream_options")

    def _row(self, prompt: int, completion: Completion) -> SglangRow:
        index = self.head.choice_index(prompt, completion.index)
        meta = self._meta(prompt, index, completion, completion.tokens, completion.logprobs, completion.top_logprobs)
        text = self._text(completion, meta.finish_reason)
        return SglangRow(text=text, output_ids=list(completion.tokens), meta_info=meta, index=index)

    def _text(self, completion: Completion, reason: FinishReason | None) -> str:
        if not self._shown.special_tokens and not self._shown.stop:
            return completion.text
        matched = reason.matched if reason is not None else None
        trims = not self._shown.stop
        tokens = completion.tokens[:-1] if trims and isinstance(matched, int) else completion.tokens
        text = self.head.tokenizer.decode(tokens, special=self._shown.special_tokens)
        return text.partition(matched)[0] if trims and isinstance(matched, str) else text

    def _meta(
        self,
        prompt: int,
        index: int,
        completion: Completion | None,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[Sequence[TopLogprob]],
    ) -> MetaInfo:
        request = self.head.requests[prompt]
        version = None if completion is None else version_of(completion)
        meta = MetaInfo(
            id=self._body.request_id or self.head.answer_id,
            finish_reason=None if completion is None else self._finish_reason(completion, request),
            prompt_tokens=len(request.prompt_tokens),
            completion_tokens=len(tokens),
            cached_tokens=0 if completion is None else completion.num_cached_prompt_tokens,
            e2e_latency=time.perf_counter() - self._began,
            logprobs_mode="temperature",
            step_id=self._body.step_id,
            policy_version=version,
            weight_version=None if version is None else str(version),
            weight_versions=[] if completion is None else weight_versions(completion),
        )
        if not self._shown.logprobs:
            return meta
        update: dict[str, object] = {"input_token_logprobs": self._of_prompt(request, completion)}
        update["output_token_logprobs"] = [self._logprob(*pair) for pair in zip(logprobs, tokens, strict=True)]
        if self._body.logprobs:
            update["output_top_logprobs"] = [self._tops(top) for top in tops]
            if self._shown.prompt_from >= 0:
                update["input_top_logprobs"] = self._tops_of_prompt(completion)
        return meta.model_copy(update=update)

    def _of_prompt(self, request: GenerationRequest, completion: Completion | None) -> list[Logprob]:
        told = None if completion is None else completion.prompt_logprobs
        if self._shown.prompt_from < 0 or told is None:
            return []
        pairs = zip(told, request.prompt_tokens, strict=True)
        whole = [self._logprob(None if one is None else one.logprob, token) for one, token in pairs]
        return whole[self._shown.prompt_from :]

    def _tops_of_prompt(self, completion: Completion | None) -> list[list[Logprob] | None]:
        scored = () if completion is None else completion.prompt_logprobs or ()
        return [None if each is None else self._tops(each.top) for each in scored[self._shown.prompt_from :]]

    def _tops(self, top: Sequence[TopLogprob]) -> list[Logprob]:
        return [self._logprob(each.logprob, each.token) for each in top]

    def _logprob(self, logprob: float | None, token: int) -> Logprob:
        text = self.head.tokenizer.token_text(token) if self._shown.texts_in_logprobs else None
        return None if logprob is None else finite(logprob), token, text

    def _finish_reason(self, completion: Completion, request: GenerationRequest) -> FinishReason:
        match completion.finish_reason:
            case "stop":
                return FinishReason(type="stop", matched=self._matched(completion, request))
            case "length":
                return FinishReason(type="length", length=len(completion.tokens))
            case "abort":
                # clients tell by these words whether anything was computed
                return FinishReason(type="abort", message="Aborted" if completion.tokens else "Abort before prefill")

    def _matched(self, completion: Completion, request: GenerationRequest) -> int | str:
        """What has ended the completion: a stop string, or the last token."""
        end = completion.tokens[-1]
        text = self.head.tokenizer.decode(completion.tokens)
        found = [(text.find(stop), stop) for stop in request.sampling.stop if stop in text]
        return min(found)[1] if found and end not in request.sampling.stop_token_ids else end
