"""Requests of this process to its own application: routes and checks of HTTP without a socket and without keys."""

from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from parallm.client import ApiError, AsyncClient
from parallm.client.calls import Call
from parallm.errors import (
    AdapterError,
    AdapterMissing,
    CheckpointError,
    ContextTooLong,
    EngineFull,
    EngineStopped,
    InvalidRequest,
    NotFinite,
    ParallmError,
    Unavailable,
    UnknownModel,
    UnknownTrajectory,
)
from parallm.server.operation.request_context import LOCAL

ADDRESS = "http://localhost"
ERRORS: Mapping[str, type[ParallmError]] = {
    "model_not_found": UnknownModel,
    "trajectory_not_found": UnknownTrajectory,
    "engine_full": EngineFull,
    "not_finite": NotFinite,
    "engine_stopped": EngineStopped,
    "unavailable": Unavailable,
    "checkpoint_failed": CheckpointError,
    "adapter_not_found": AdapterMissing,
    "invalid_adapter": AdapterError,
}
"""Errors by the codes of `server/failures.py`; `_error` has those with a parameter."""

Result = TypeVar("Result")


class LocalClient:
    """A client of the application in this process, on its event loop. Failures are errors of `parallm.errors`."""

    def __init__(self, app: ASGIApp) -> None:
        async def local(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, LOCAL: True}, receive, send)

        transport = httpx.ASGITransport(local)
        self._http = httpx.AsyncClient(transport=transport, base_url=ADDRESS, timeout=None, trust_env=False)
        self.client = AsyncClient("", http=self._http)
        """A client for `ask`, whose methods raise ApiError."""

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer's JSON. Raises ParallmError."""
        call: Call[Any] = Call(method="POST", path=path, read=lambda answer: answer, fields=body)
        response = await self._http.request(call.method, call.path, **call.options())
        try:
            return call.result(response)
        except ApiError as error:
            raise _error(error) from None

    async def ask(self, asked: Awaitable[Result]) -> Result:
        """Await a method of `client`. Raises ParallmError."""
        try:
            return await asked
        except ApiError as error:
            raise _error(error) from None
        except ValueError as error:  # JSON has no infinite numbers
            raise InvalidRequest(str(error)) from error

    async def close(self) -> None:
        await self._http.aclose()


def _error(error: ApiError) -> ParallmError:
    if error.code == "context_length_exceeded":
        return ContextTooLong(str(error), error.param)
    if error.status in (400, 413) and error.code not in ERRORS:
        return InvalidRequest(str(error), error.param)
    return ERRORS.get(error.code or "", ParallmError)(str(error))
