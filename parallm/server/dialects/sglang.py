"""SGLang's `/generate`, as slime, AReaL and Atropos' SGLangServer ask for it.

The answer is one object, or a list of them for several completions; chunks of a stream are cumulative.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, RootModel

from parallm.errors import InvalidRequest
from parallm.server.catalog import version_of
from parallm.server.dialects.dialect import Dialect, DialectRequest, completion_body
from parallm.server.failures import Failure
from parallm.server.generation import ResponseContext, weight_versions
from parallm.server.openai.completion_schemas import CompletionBody, Usage, WeightVersions, read_prompts
from parallm.server.openai.logprobs import finite
from parallm.server.schemas import MAX_INT, Wire, checked, is_tokens
from parallm.types import Completion, GenerationRequest, TokenEvent, TopLogprob

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


def read_text_prompts(value: object) -> list[str | list[int]]:
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        raise ValueError("should be a string or a list of strings")
    return read_prompts(value)


def read_token_prompts(value: object) -> list[str | list[int]]:
    if not isinstance(value, list) or any(isinstance(item, str) for item in value):
        raise ValueError("should be a list of token ids or a list of such lists")
    return read_prompts(value)


class SglangBody(Wire):
    text: Annotated[list[str | list[int]], PlainValidator(read_text_prompts)] | None = None
    input_ids: Annotated[list[str | list[int]], PlainValidator(read_token_prompts)] | None = None
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    rid: str | None = None
    model: str
    lora_path: str | None = None
    """Name of an adapter, which wins over `model`."""
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1, le=MAX_INT)] = -1
    """Index of the first token of the prompt whose log-prob to return; -1: none."""
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_INT)] = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    priority: int = 0
    step_id: int | str | None = None


Logprob = tuple[float | None, int, str | None]
"""Log-probability (null for the first token of a prompt), token id, and its text if the client asks for it."""


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
    """Cached tokens of the prompt; 0 until the completion has ended."""
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


@dataclass(slots=True)
class _StreamedChoice:
    """One choice of a stream so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[TopLogprob, ...]] = field(default_factory=list)


class SglangBuilder:
    """Builds whole answers, and chunks that repeat what it has streamed of each choice."""

    def __init__(
        self,
        context: ResponseContext,
        *,
        body: CompletionBody,
        own: SglangBody,
        is_batch: bool,
        special_tokens: bool,
        keeps_stop: bool,
    ) -> None:
        """`is_batch`: prompts came in a list, so that answers do; `keeps_stop`: texts have what has ended them."""
        self.context = context
        self._body = body
        self._own = own
        self._is_batch = is_batch
        self._special_tokens = special_tokens
        self._keeps_stop = keeps_stop
        self._began = time.perf_counter()
        self._streamed: dict[int, _StreamedChoice] = {}

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> SglangRow | SglangRows:
        rows = [self._row(prompt, completion) for prompt, group in enumerate(completions) for completion in group]
        return SglangRows(rows) if self._is_batch or len(rows) > 1 else rows[0]

    def opening(self, model: str) -> list[SglangRow]:
        return []

    def text_chunk(self, model: str, prompt: int, event: TokenEvent) -> SglangRow | None:
        index = self.context.choice_index(prompt, event.index)
        choice = self._streamed.setdefault(index, _StreamedChoice())
        choice.text += event.text
        choice.tokens += event.tokens
        choice.logprobs += event.logprobs
        choice.top_logprobs += event.top_logprobs
        if event.completion is not None:  # the last chunk has it
            return None
        text = self.context.tokenizer.decode(choice.tokens, special=True) if self._special_tokens else choice.text
        return SglangRow(text=text, output_ids=choice.tokens, meta_info=self._meta(prompt, choice), index=index)

    def final_chunk(self, model: str, prompt: int, completion: Completion) -> SglangRow:
        return self._row(prompt, completion)

    def usage_chunk(self, model: str, usage: Usage) -> SglangRow:
        raise AssertionError("SGLang's bodies have no stream_options")

    def _row(self, prompt: int, completion: Completion) -> SglangRow:
        index = self.context.choice_index(prompt, completion.index)
        meta = self._meta(prompt, completion)
        text = self._text(completion, meta.finish_reason)
        return SglangRow(text=text, output_ids=list(completion.tokens), meta_info=meta, index=index)

    def _text(self, completion: Completion, reason: FinishReason | None) -> str:
        if not self._special_tokens and not self._keeps_stop:
            return completion.text
        matched = None if reason is None or self._keeps_stop else reason.matched
        tokens = completion.tokens[:-1] if isinstance(matched, int) else completion.tokens
        text = self.context.tokenizer.decode(tokens, special=self._special_tokens)
        return text.partition(matched)[0] if isinstance(matched, str) else text

    def _meta(self, prompt: int, choice: Completion | _StreamedChoice) -> MetaInfo:
        request, completion = self.context.requests[prompt], choice if isinstance(choice, Completion) else None
        version = None if completion is None else version_of(completion)
        meta = MetaInfo(
            id=self.context.answer_id,
            finish_reason=None if completion is None else self._finish_reason(completion, request),
            prompt_tokens=len(request.prompt_tokens),
            completion_tokens=len(choice.tokens),
            cached_tokens=0 if completion is None else completion.num_cached_prompt_tokens,
            e2e_latency=time.perf_counter() - self._began,
            logprobs_mode="temperature",
            step_id=self._body.step_id,
            policy_version=version,
            weight_version=None if version is None else str(version),
            weight_versions=[] if completion is None else weight_versions(completion),
        )
        if not self._own.return_logprob:
            return meta
        pairs = zip(choice.logprobs, choice.tokens, strict=True)
        update: dict[str, object] = {"input_token_logprobs": self._prompt_logprobs(request, completion)}
        update["output_token_logprobs"] = [self._logprob(*pair) for pair in pairs]
        if self._body.logprobs:
            update["output_top_logprobs"] = [self._tops(top) for top in choice.top_logprobs]
            if self._own.logprob_start_len >= 0:
                update["input_top_logprobs"] = self._prompt_tops(completion)
        return meta.model_copy(update=update)

    def _prompt_logprobs(self, request: GenerationRequest, completion: Completion | None) -> list[Logprob]:
        scored = None if completion is None else completion.prompt_logprobs
        if self._own.logprob_start_len < 0 or scored is None:
            return []
        pairs = zip(scored, request.prompt_tokens, strict=True)
        whole = [self._logprob(None if score is None else score.logprob, token) for score, token in pairs]
        return whole[self._own.logprob_start_len :]

    def _prompt_tops(self, completion: Completion | None) -> list[list[Logprob] | None]:
        scored = () if completion is None else completion.prompt_logprobs or ()
        return [None if token is None else self._tops(token.top) for token in scored[self._own.logprob_start_len :]]

    def _tops(self, top: Sequence[TopLogprob]) -> list[Logprob]:
        return [self._logprob(likely.logprob, likely.token) for likely in top]

    def _logprob(self, logprob: float | None, token: int) -> Logprob:
        text = self.context.tokenizer.token_text(token) if self._own.return_text_in_logprobs else None
        return None if logprob is None else finite(logprob), token, text

    def _finish_reason(self, completion: Completion, request: GenerationRequest) -> FinishReason:
        match completion.finish_reason:
            case "stop":
                return FinishReason(type="stop", matched=self._matched(completion, request))
            case "length":
                return FinishReason(type="length", length=len(completion.tokens))
            case "abort":
                # these words say to clients whether anything was computed
                return FinishReason(type="abort", message="Aborted" if completion.tokens else "Abort before prefill")

    def _matched(self, completion: Completion, request: GenerationRequest) -> int | str:
        """Return what has ended the completion: a stop string, or the last token."""
        end = completion.tokens[-1]
        text = self.context.tokenizer.decode(completion.tokens)
        matches = [(text.find(stop), stop) for stop in request.sampling.stop if stop in text]
        return min(matches)[1] if matches and end not in request.sampling.stop_token_ids else end


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
    special, keeps = _text_options(params)
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
    is_batch = isinstance(given, list) and not is_tokens(given)
    answers = partial(SglangBuilder, body=body, own=own, is_batch=is_batch, special_tokens=special, keeps_stop=keeps)
    return DialectRequest(body=body, whole=answers, stream=answers)


def _refusal(failure: Failure) -> SglangError:
    return SglangError(error=SglangErrorDetail(message=failure.answer.error.message))


def _text_options(params: dict[str, Any]) -> tuple[bool, bool]:
    """Take out of `params` whether the text has special tokens, and whether it keeps what has ended it."""
    skips, keeps = params.pop("skip_special_tokens", True), params.pop("no_stop_trim", False)
    for name, value in (("skip_special_tokens", skips), ("no_stop_trim", keeps)):
        if not isinstance(value, bool):
            raise InvalidRequest(f"sampling_params.{name} should be true or false", f"sampling_params.{name}")
    return not skips, keeps


SGLANG = Dialect(name="sglang", read=read, refusal=_refusal)
