"""Exceptions to OpenAI's error shape: the only place that knows HTTP statuses of errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from parallm.errors import (
    AdapterError,
    AdapterMissing,
    CheckpointError,
    ContextTooLong,
    EngineFull,
    EngineStopped,
    FolderInUse,
    InvalidRequest,
    NotFinite,
    NotStored,
    ParallmError,
    Unavailable,
    UnknownModel,
    UnknownTrajectory,
)
from parallm.server.schemas import ErrorAnswer, ErrorDetail


class BodyTooLarge(InvalidRequest):
    """The request body is larger than `server.max_body_bytes`."""


class BodyTooSlow(ParallmError):
    """The client sends the request body more slowly than a connection is held for."""


class WrongKey(ParallmError):
    """The request has no API key, or one that this server does not know."""


class NotAllowed(ParallmError):
    """The key's role, or the server's settings, do not allow this route."""


class ForeignOrigin(NotAllowed):
    """A browser sent this for a page of another origin."""


class ForeignHost(NotAllowed):
    """The request calls this server by a name that is not one of its own."""


class UnknownRequest(ParallmError):
    """No request of that id is running, or none that this key may see."""


class Draining(ParallmError):
    """The server ends and takes no new requests; another one may be there after `seconds`."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


class DeadlineExceeded(ParallmError):
    """The answer was not complete in the time that the client or the server allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The answer to a request that failed; the status counts only before the first byte of a response."""

    status: int
    answer: ErrorAnswer
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Form of the answer to the errors of one class."""

    status: int
    code: str
    type: str = "invalid_request_error"
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


_INTERNAL = _Kind(500, "internal_error", "server_error")
_KINDS: Mapping[type[Exception], _Kind] = {
    InvalidRequest: _Kind(400, "invalid_value"),
    ContextTooLong: _Kind(400, "context_length_exceeded"),
    AdapterError: _Kind(400, "invalid_adapter"),
    WrongKey: _Kind(401, "invalid_api_key", "authentication_error", headers={"WWW-Authenticate": "Bearer"}),
    NotAllowed: _Kind(403, "not_allowed", "permission_error"),
    UnknownModel: _Kind(404, "model_not_found", param="model"),
    UnknownTrajectory: _Kind(404, "trajectory_not_found", param="id"),
    UnknownRequest: _Kind(404, "request_not_found", param="request_id"),
    AdapterMissing: _Kind(404, "adapter_not_found"),
    BodyTooSlow: _Kind(408, "request_timeout", headers={"Connection": "close"}),
    FolderInUse: _Kind(409, "folder_in_use"),
    Unavailable: _Kind(409, "unavailable"),
    BodyTooLarge: _Kind(413, "request_too_large"),
    NotFinite: _Kind(422, "not_finite", param="model"),  # not 5xx: clients would send it again, and get the same
    EngineFull: _Kind(429, "engine_full", "rate_limit_error", headers={"Retry-After": "1"}),
    CheckpointError: _Kind(500, "checkpoint_failed", "server_error"),
    EngineStopped: _Kind(503, "engine_stopped", "server_error"),
    Draining: _Kind(503, "draining", "server_error", headers={"Connection": "close"}),
    # OpenAI's clients repeat what failed with 5xx, and would wait as long again for nothing
    DeadlineExceeded: _Kind(504, "deadline_exceeded", "server_error", headers={"x-should-retry": "false"}),
    NotStored: _Kind(507, "not_stored", "server_error"),
}
"""Forms by class of the error; the nearest base class counts."""


def failure_of(error: Exception) -> Failure:
    """Return the answer to a request that raised `error`. Other classes get a text without their cause."""
    kind = next((_KINDS[base] for base in type(error).__mro__ if base in _KINDS), _INTERNAL)
    message, param, headers = str(error), kind.param, kind.headers
    if kind is _INTERNAL:
        message = "the server failed to answer; its log has the cause"
    elif isinstance(error, InvalidRequest):
        message, param = error.for_clients if isinstance(error, ContextTooLong) else message, error.parameter
    elif isinstance(error, Draining):
        headers = {"Retry-After": str(error.seconds), **headers}
    return failure(kind.status, message, kind=kind.type, param=param, code=kind.code, headers=headers)


def failure(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Failure:
    detail = ErrorDetail(message=message, type=kind, param=param, code=code)
    return Failure(status=status, answer=ErrorAnswer(error=detail), headers=headers or {})
