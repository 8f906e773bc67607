"""One server that samples for this trainer: HTTP to the routes of `server/control/routes_replicas.py`.

A call raises EngineLost where the server, or the way to it, may come back, and EngineRefused where it must be changed.
"""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from typing import Any

import httpx
from pydantic import BaseModel

from parallm.client.calls import ApiError, Call
from parallm.errors import ContextTooLong, InvalidRequest, NotFinite, ParallmError
from parallm.server.control.replica_schemas import (
    JoinAnswer,
    JoinBody,
    LeaveBody,
    ReceivedVersion,
    SampleBody,
    SampledCompletion,
)
from parallm.server.failures import error_of

KEY_VARIABLE = "PARALLM_API_KEY"
"""Environment variable with the key that is sent to all servers, as for `server=network`."""
CALL_SECONDS = 10.0
"""Time limit of connecting, and of calls without arrays."""
SILENCE_SECONDS = 15.0
"""A stream that brings nothing for as long is lost; a server that lives sends a mark every 2 seconds."""
PUBLISH_SECONDS = 30.0
"""Time limit of the answer to a version that was sent; the device of the server may be in the middle of a unit."""
REFUSALS = (400, 401, 403, 404, 405, 409, 413)
"""Statuses that last until the server, or the trainer, is started with other settings."""
DATA = "data: "


class EngineLost(ParallmError):
    """The server does not answer, or not now."""


class EngineRefused(ParallmError):
    """The server and this trainer do not fit; the message says what to change."""


class ReplicaClient:
    """Used on the asyncio thread."""

    def __init__(self, url: str, http: httpx.AsyncClient, *, headers: Mapping[str, str]) -> None:
        self.url = url.rstrip("/")
        self._http = http
        self._headers = headers

    async def join(self, body: JoinBody) -> JoinAnswer:
        """Begin or continue the session. Raises EngineLost, EngineRefused."""
        try:
            return await self._call("POST", "/v1/replica/join", body, JoinAnswer)
        except EngineRefused as error:
            cause = error.__cause__
            if isinstance(cause, ApiError) and cause.code == "unknown_url":
                raise EngineRefused(
                    f"{self.url} has no POST /v1/replica/join: it is another program, or a ParaLLM that is older than "
                    "this trainer; install the same version on both"
                ) from error
            raise

    async def send(self, session: str, version: int, content: bytes) -> ReceivedVersion:
        """Send a version as safetensors. Raises EngineLost, EngineRefused."""
        path = f"/v1/replica/versions/{version}?session={session}"
        return await self._call("PUT", path, content, ReceivedVersion, seconds=PUBLISH_SECONDS)

    async def leave(self, session: str) -> None:
        await self._call("POST", "/v1/replica/leave", LeaveBody(session=session), None)

    async def sample(self, body: SampleBody) -> AsyncGenerator[SampledCompletion, None]:
        """Yield each completion as soon as it ends; closing it aborts the request.

        Raises EngineLost, also for a stream that ends before its time, and EngineRefused; ContextTooLong,
        InvalidRequest and NotFinite for a request that no server could answer.
        """
        missing = body.n
        async with self._answers(is_request=True):
            request = self._http.stream(
                "POST",
                f"{self.url}/v1/replica/generate",
                content=body.model_dump_json(),
                headers=self._headers,
                timeout=httpx.Timeout(CALL_SECONDS, read=SILENCE_SECONDS),
            )
            async with request as response:
                if not response.is_success:
                    await response.aread()
                    Call("POST", "", lambda answer: answer).result(response)
                async with aclosing(response.aiter_lines()) as lines:  # type: ignore[type-var]
                    async for line in lines:
                        if line.startswith(DATA):
                            yield self._completion(line.removeprefix(DATA))
                            missing -= 1
                            if not missing:
                                return
        raise EngineLost(f"{self.url} ended its answer {missing} completions too early")

    def _completion(self, text: str) -> SampledCompletion:
        value = json.loads(text)
        if "error" in value:
            detail = value["error"]
            raise ApiError(400, detail["message"], detail.get("code"), detail.get("param"))
        return SampledCompletion.model_validate_json(text)

    async def _call(
        self,
        method: Any,
        path: str,
        body: BaseModel | bytes,
        kind: type[Any] | None,
        *,
        seconds: float = CALL_SECONDS,
    ) -> Any:
        """`seconds`: longest wait for the answer; each part of the way there has `CALL_SECONDS`."""
        content = body if isinstance(body, bytes) else body.model_dump_json(exclude_none=True).encode()
        async with self._answers():
            response = await self._http.request(
                method,
                self.url + path,
                content=content,
                headers=self._headers,
                timeout=httpx.Timeout(CALL_SECONDS, read=seconds),
            )
            answer = Call(method, path, lambda answer: answer).result(response)
            return None if kind is None else kind.model_validate(answer)

    @asynccontextmanager
    async def _answers(self, *, is_request: bool = False) -> AsyncGenerator[None, None]:
        """Turn what goes wrong into the errors of this module, with the server's address.

        `is_request`: what the engine refuses is the fault of the request.
        """
        try:
            yield
        except httpx.HTTPError as error:
            raise EngineLost(f"{self.url} does not answer: {str(error) or type(error).__name__}") from error
        except ApiError as error:
            own = error_of(error.status, error.code, f"{self.url}: {error}", error.param)
            if is_request and error.code and type(own) in (ContextTooLong, InvalidRequest, NotFinite):
                raise own from error
            if error.status == HTTPStatus.UNAUTHORIZED:
                raise EngineRefused(f"{self.url}: {error}; set {KEY_VARIABLE} to its key") from error
            kind = EngineRefused if error.status in REFUSALS and not is_request else EngineLost
            raise kind(f"{self.url}: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise EngineRefused(f"{self.url} answers in another form than this version of ParaLLM: {error}") from error
