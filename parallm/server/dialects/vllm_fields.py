"""What vLLM's dialects share: the fields of its SamplingParams in ours, and its errors."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from parallm.server.failures import Failure
from parallm.server.schemas import Wire

DEFAULT_MAX_TOKENS = 16
TEXT_ONLY = ("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind")
"""They shape text alone."""


class VllmErrorDetail(Wire):
    message: str
    type: str
    param: str | None
    code: int


class VllmError(Wire):
    error: VllmErrorDetail


def sampling_fields(params: Mapping[str, Any], *, has_text: bool) -> dict[str, Any]:
    """Fields of `/v1/completions`. What shapes text alone is left out where there will be none."""
    ignored = () if has_text else TEXT_ONLY
    return {"max_tokens": DEFAULT_MAX_TOKENS} | {name: value for name, value in params.items() if name not in ignored}


def refusal(failure: Failure) -> VllmError:
    told = failure.answer.error
    kind = f"{HTTPStatus(failure.status).phrase.title().replace(' ', '')}Error"
    return VllmError(error=VllmErrorDetail(message=told.message, type=kind, param=told.param, code=failure.status))
