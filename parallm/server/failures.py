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

RETRY_AFTER_SECONDS = 1


class BodyTooLarge(InvalidRequest):
    """The request body is larger than `server.max_body_bytes`."""


class BodyTooSlow(ParallmError):
    """The client sends the request body more slowly than a connection is held for."""


class WrongKey(ParallmError):
    """No API key, or one that this server does not know."""


class NotAllowed(ParallmError):
    """The key's role, or the server's settings, do not allow this route."""


class ForeignOrigin(NotAllowed):
    """A browser sent this for a page of another origin."""


class ForeignHost(NotAllowed):
    """The request calls this server by a name that is not one of its own."""


class UnknownRequest(ParallmError):
    """No request of that id is under way, or none that this key may see."""


class Draining(ParallmError):
    """The server ends and takes no new requests; another one may be there after `seconds`."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


class DeadlineExceeded(ParallmError):
    """The answer was not there in the time that the client or the server gave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a client is told: the status counts only before the first byte of a response."""

    status: int
    answer: ErrorAnswer
    headers: Mapping[str, str] = field(default_factory=dict)


def failure_of(error: Exception) -> Failure:
    """Everything that is not our own error is an internal one and says nothing of its cause."""
    match error:
        case BodyTooLarge():
            return failure(413, str(error), code="request_too_large")
        case ContextTooLong():
            return failure(400, error.for_clients, param=error.parameter, code="context_length_exceeded")
        case InvalidRequest():
            return failure(400, str(error), param=error.parameter, code="invalid_value")
        case BodyTooSlow():
            return failure(408, str(error), code="request_timeout", headers={"Connection": "close"})
        case UnknownModel():
            return failure(404, str(error), param="model", code="model_not_found")
        case UnknownTrajectory():
            return failure(404, str(error), param="id", code="trajectory_not_found")
        case UnknownRequest():
            return failure(404, str(error), param="request_id", code="request_not_found")
        case EngineFull():
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            return failure(429, str(error), kind="rate_limit_error", code="engine_full", headers=headers)
        case NotFinite():
            # not 5xx: clients would send it again, and get the same
            return failure(422, str(error), param="model", code="not_finite")
        case EngineStopped():
            return failure(503, str(error), kind="server_error", code="engine_stopped")
        case _:
            return _failure_of_access(error) or _failure_of_control(error) or _internal()


def _failure_of_access(error: Exception) -> Failure | None:
    match error:
        case WrongKey():
            headers = {"WWW-Authenticate": "Bearer"}
            return failure(401, str(error), kind="authentication_error", code="invalid_api_key", headers=headers)
        case NotAllowed():
            return failure(403, str(error), kind="permission_error", code="not_allowed")
        case Draining():
            headers = {"Retry-After": str(error.seconds), "Connection": "close"}
            return failure(503, str(error), kind="server_error", code="draining", headers=headers)
        case DeadlineExceeded():
            # OpenAI's clients repeat what failed with 5xx, and would wait as long again for nothing
            headers = {"x-should-retry": "false"}
            return failure(504, str(error), kind="server_error", code="deadline_exceeded", headers=headers)
        case _:
            return None


def _failure_of_control(error: Exception) -> Failure | None:
    match error:
        case FolderInUse():
            return failure(409, str(error), code="folder_in_use")
        case Unavailable():
            return failure(409, str(error), code="unavailable")
        case NotStored():
            return failure(507, str(error), kind="server_error", code="not_stored")
        case CheckpointError():
            return failure(500, str(error), kind="server_error", code="checkpoint_failed")
        case AdapterMissing():
            return failure(404, str(error), code="adapter_not_found")
        case AdapterError():
            return failure(400, str(error), code="invalid_adapter")
        case _:
            return None


def _internal() -> Failure:
    message = "the server failed to answer; its log has the cause"
    return failure(500, message, kind="server_error", code="internal_error")


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
