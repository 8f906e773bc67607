"""Exceptions to OpenAI's error shape: the only place that knows HTTP statuses of errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from parallm.errors import (
    AdapterError,
    AdapterMissing,
    CheckpointError,
    ContextTooLong,
    EngineFull,
    EngineStopped,
    FileTooLarge,
    FolderInUse,
    InvalidRequest,
    ModelError,
    NoMemory,
    NotFinite,
    NotStored,
    ParallmError,
    RolloutsDamaged,
    RunUnreadable,
    Unavailable,
    UnknownModel,
    UnknownObject,
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


class TooManyWatchers(ParallmError):
    """As many pages watch as this server allows."""


class UnknownRequest(ParallmError):
    """No request of that id is running, or none that this key may see."""


class Draining(ParallmError):
    """The server ends and takes no new requests; another one may be there after `seconds`."""

    def __init__(self, message: str, seconds: int = 1) -> None:
        super().__init__(message)
        self.seconds = seconds


class DeadlineExceeded(ParallmError):
    """The answer was not complete in the time that the client or the server allows."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer to a request that failed; the status counts only before the first byte of a response."""

    status: int
    code: str | None = None
    kind: str = "invalid_request_error"
    param: str | None = None
    message: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def answer(self) -> ErrorAnswer:
        detail = ErrorDetail(message=self.message, type=self.kind, param=self.param, code=self.code)
        return ErrorAnswer(error=detail)


_INTERNAL = Failure(500, "internal_error", "server_error", message="the server failed to answer; its log has the cause")
_FAILURES: Mapping[type[Exception], Failure] = {
    InvalidRequest: Failure(400, "invalid_value"),
    ContextTooLong: Failure(400, "context_length_exceeded"),
    AdapterError: Failure(400, "invalid_adapter"),
    WrongKey: Failure(401, "invalid_api_key", "authentication_error", headers={"WWW-Authenticate": "Bearer"}),
    NotAllowed: Failure(403, "not_allowed", "permission_error"),
    UnknownModel: Failure(404, "model_not_found", param="model"),
    UnknownTrajectory: Failure(404, "trajectory_not_found", param="id"),
    UnknownObject: Failure(404, "not_found", param="id"),
    UnknownRequest: Failure(404, "request_not_found", param="request_id"),
    RolloutsDamaged: Failure(422, "rollouts_damaged", param="step"),
    AdapterMissing: Failure(404, "adapter_not_found"),
    BodyTooSlow: Failure(408, "request_timeout", headers={"Connection": "close"}),
    FolderInUse: Failure(409, "folder_in_use"),
    Unavailable: Failure(409, "unavailable"),
    BodyTooLarge: Failure(413, "request_too_large"),
    FileTooLarge: Failure(413, "file_too_large"),
    NotFinite: Failure(422, "not_finite", param="model"),  # not 5xx: clients would send it again, and get the same
    EngineFull: Failure(429, "engine_full", "rate_limit_error", headers={"Retry-After": "1"}),
    RunUnreadable: Failure(422, "run_unreadable"),
    TooManyWatchers: Failure(429, "too_many_watchers", "rate_limit_error", headers={"Retry-After": "10"}),
    ModelError: Failure(422, "invalid_model", param="model"),  # nor would these files load a second time
    CheckpointError: Failure(500, "checkpoint_failed", "server_error"),
    NoMemory: Failure(503, "no_memory", "server_error", param="model", headers={"Retry-After": "5"}),
    EngineStopped: Failure(503, "engine_stopped", "server_error"),
    Draining: Failure(503, "draining", "server_error", headers={"Connection": "close"}),
    # OpenAI's clients repeat what failed with 5xx, and would wait as long again for nothing
    DeadlineExceeded: Failure(504, "deadline_exceeded", "server_error", headers={"x-should-retry": "false"}),
    NotStored: Failure(507, "not_stored", "server_error"),
}
"""Failures by class of the error, without their messages; the nearest base class counts."""
_CLASSES = {failure.code: error for error, failure in _FAILURES.items()}


def failure_of(error: Exception) -> Failure:
    """Return the answer to a request that raised `error`. Other classes get a text without their cause."""
    known = next((_FAILURES[base] for base in type(error).__mro__ if base in _FAILURES), None)
    if known is None:
        return _INTERNAL
    if isinstance(error, InvalidRequest):
        message = error.for_clients if isinstance(error, ContextTooLong) else str(error)
        return replace(known, message=message, param=error.parameter)
    if isinstance(error, Draining):
        known = replace(known, headers={"Retry-After": str(error.seconds), **known.headers})
    return replace(known, message=str(error))


def error_of(status: int, code: str | None, message: str, param: str | None) -> Exception:
    """Return the error of a failure that this process has answered itself with; the inverse of `failure_of`."""
    kind = _CLASSES.get(code, InvalidRequest if status in (400, 413) else ParallmError)
    return kind(message, param) if issubclass(kind, InvalidRequest) else kind(message)
