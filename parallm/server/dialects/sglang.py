"""Answers of SGLang's `/generate`: one object, or a list of them for several; chunks of a stream are cumulative."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, RootModel

from parallm.errors import InvalidRequest
from parallm.server.dialects.dialect import Dialect, DialectRequest, completion_body
from parallm.server.failures import Failure
from parallm.server.generation import ResponseContext, version_of, weight_versions
from parallm.server.openai.logprobs import finite
from parallm.server.schemas import (
    MAX_INT,
    CompletionBody,
    Usage,
    WeightVersions,
    Wire,
    checked,
    is_tokens,
    read_prompts,
)
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
class SglangOptions:
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

    def __init__(self, context: ResponseContext, body: CompletionBody, shown: SglangOptions) -> None:
        self.context = context
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
        index = self.context.choice_index(prompt, event.index)
        grown = self._grown.setdefault(index, _Grown())
        grown.text += event.text
        grown.tokens += event.tokens
        grown.logprobs += event.logprobs
        grown.tops += event.top_logprobs
        if event.completion is not None:  # told by the last chunk
            return None
        text = self.context.tokenizer.decode(grown.tokens, special=True) if self._shown.special_tokens else grown.text
        meta = self._meta(prompt, index, None, grown.tokens, grown.logprobs, grown.tops)
        return SglangRow(text=text, output_ids=grown.tokens, meta_info=meta, index=index)

    def final_chunk(self, model: str, prompt: int, completion: Completion) -> SglangRow:
        return self._row(prompt, completion)

    def usage_chunk(self, model: str, usage: Usage) -> SglangRow:
        raise AssertionError("SGLang's bodies have no stream_options")

    def _row(self, prompt: int, completion: Completion) -> SglangRow:
        index = self.context.choice_index(prompt, completion.index)
        meta = self._meta(prompt, index, completion, completion.tokens, completion.logprobs, completion.top_logprobs)
        text = self._text(completion, meta.finish_reason)
        return SglangRow(text=text, output_ids=list(completion.tokens), meta_info=meta, index=index)

    def _text(self, completion: Completion, reason: FinishReason | None) -> str:
        if not self._shown.special_tokens and not self._shown.stop:
            return completion.text
        matched = reason.matched if reason is not None else None
        trims = not self._shown.stop
        tokens = completion.tokens[:-1] if trims and isinstance(matched, int) else completion.tokens
        text = self.context.tokenizer.decode(tokens, special=self._shown.special_tokens)
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
        request = self.context.requests[prompt]
        version = None if completion is None else version_of(completion)
        meta = MetaInfo(
            id=self._body.request_id or self.context.answer_id,
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
        text = self.context.tokenizer.token_text(token) if self._shown.texts_in_logprobs else None
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
        text = self.context.tokenizer.decode(completion.tokens)
        found = [(text.find(stop), stop) for stop in request.sampling.stop if stop in text]
        return min(found)[1] if found and end not in request.sampling.stop_token_ids else end


RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "json_schema": "guided_json",
    "regex": "guided_regex",
}
DEFAULT_MAX_TOKENS = 128
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio_data": ([],),
    "background": (False,),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_logit_processor": (),
    "image_data": ([],),
    "input_embeds": (),
    "log_metrics": (True, False),
    "modalities": ([],),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "session_params": (),
    "token_ids_logprob": ([],),
    "video_data": ([],),
}
"""Fields of SGLang that are not implemented here, with the values that ask for nothing."""


def read_texts(value: object) -> list[str | list[int]]:
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        raise ValueError("should be a string or a list of strings")
    return read_prompts(value)


def read_ids(value: object) -> list[str | list[int]]:
    if not isinstance(value, list) or any(isinstance(item, str) for item in value):
        raise ValueError("should be a list of token ids or a list of such lists")
    return read_prompts(value)


class SglangBody(Wire):
    text: Annotated[list[str | list[int]], PlainValidator(read_texts)] | None = None
    input_ids: Annotated[list[str | list[int]], PlainValidator(read_ids)] | None = None
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    rid: str | None = None
    model: str
    lora_path: str | None = None
    """Name of an adapter, and stronger than `model`."""
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1, le=MAX_INT)] = -1
    """First token of the prompt to tell the log-prob of; -1: none of it."""
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_INT)] = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    priority: int = 0
    step_id: int | str | None = None


class SglangErrorDetail(Wire):
    message: str


class SglangError(Wire):
    error: SglangErrorDetail


def read(value: Mapping[str, Any]) -> DialectRequest:
    own = checked(value, SglangBody, UNSUPPORTED)
    if (own.text is None) == (own.input_ids is None):
        raise InvalidRequest("send either text or input_ids", "text")
    if own.top_logprobs_num and not own.return_logprob:
        raise InvalidRequest("top_logprobs_num needs return_logprob: true", "top_logprobs_num")
    if own.logprob_start_len >= 0 and not own.return_logprob:
        raise InvalidRequest("logprob_start_len needs return_logprob: true", "logprob_start_len")
    prompts = own.text if own.input_ids is None else own.input_ids
    params = dict(own.sampling_params)
    given = value["text" if own.input_ids is None else "input_ids"]
    shown = _shown(own, params, is_batch=isinstance(given, list) and not is_tokens(given))
    fields = {
        "max_tokens": DEFAULT_MAX_TOKENS,
        **{RENAMED.get(name, name): item for name, item in params.items()},
        "prompt": prompts,
        "model": own.lora_path or own.model,
        "stream": own.stream,
        "priority": own.priority,
        "logprobs": own.top_logprobs_num if own.return_logprob else None,
        "prompt_logprobs": own.top_logprobs_num if own.logprob_start_len >= 0 else None,
        "request_id": own.rid,
        "step_id": own.step_id,
    }
    body = completion_body(fields, has_prompt_logprobs=True)
    answers = partial(SglangAnswers, body=body, shown=shown)
    return DialectRequest(body=body, whole=answers, stream=answers)


def refusal(failure: Failure) -> SglangError:
    return SglangError(error=SglangErrorDetail(message=failure.answer.error.message))


def _shown(own: SglangBody, params: dict[str, Any], *, is_batch: bool) -> SglangOptions:
    """What is to be seen; takes out of `params` what is about text alone."""
    chosen = {name: params.pop(name, usual) for name, usual in (("skip_special_tokens", True), ("no_stop_trim", False))}
    for name, wanted in chosen.items():
        if not isinstance(wanted, bool):
            raise InvalidRequest(f"sampling_params.{name} should be true or false", f"sampling_params.{name}")
    return SglangOptions(
        is_batch=is_batch,
        logprobs=own.return_logprob,
        prompt_from=own.logprob_start_len,
        texts_in_logprobs=own.return_text_in_logprobs,
        special_tokens=not chosen["skip_special_tokens"],
        stop=chosen["no_stop_trim"],
    )


SGLANG = Dialect(name="sglang", read=read, refusal=refusal)
