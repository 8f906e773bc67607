"""SGLang's `/generate`, as slime, AReaL and Atropos' SGLangServer ask for it."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from parallm.errors import InvalidRequest
from parallm.server.dialects.dialect import Asked, Dialect, completion_body
from parallm.server.dialects.sglang_answers import SglangAnswers, Shown
from parallm.server.failures import Failure
from parallm.server.parse import checked
from parallm.server.schemas import LARGEST_INT, Wire, is_tokens, read_prompts

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
    logprob_start_len: Annotated[int, Field(ge=-1, le=LARGEST_INT)] = -1
    """First token of the prompt to tell the log-prob of; -1: none of it."""
    top_logprobs_num: Annotated[int, Field(ge=0, le=LARGEST_INT)] = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    priority: int = 0
    step_id: int | str | None = None


class SglangErrorDetail(Wire):
    message: str


class SglangError(Wire):
    error: SglangErrorDetail


def read(value: Mapping[str, Any]) -> Asked:
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
    return Asked(body=body, whole=answers, stream=answers)


def refusal(failure: Failure) -> SglangError:
    return SglangError(error=SglangErrorDetail(message=failure.answer.error.message))


def _shown(own: SglangBody, params: dict[str, Any], *, is_batch: bool) -> Shown:
    """What is to be seen; takes out of `params` what is about text alone."""
    chosen = {name: params.pop(name, usual) for name, usual in (("skip_special_tokens", True), ("no_stop_trim", False))}
    for name, wanted in chosen.items():
        if not isinstance(wanted, bool):
            raise InvalidRequest(f"sampling_params.{name} should be true or false", f"sampling_params.{name}")
    return Shown(
        is_batch=is_batch,
        logprobs=own.return_logprob,
        prompt_from=own.logprob_start_len,
        texts_in_logprobs=own.return_text_in_logprobs,
        special_tokens=not chosen["skip_special_tokens"],
        stop=chosen["no_stop_trim"],
    )


SGLANG = Dialect(name="sglang", read=read, refusal=refusal)
