"""One exchange over HTTP: bounded bodies and forms in, an answer out, and work that ends when the client leaves."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from parallm.errors import InvalidRequest
from parallm.server.failures import BodyTooLarge, BodyTooSlow, DeadlineExceeded, Draining, Failure
from parallm.server.operation.request_context import current_request, note_values
from parallm.server.request_limits import SECONDS_ON_LOOP, SECONDS_PER_BYTE, BodyBudget, WorkerPool
from parallm.server.schemas import Wire, parse_body
from parallm.server.settings import ServerSettings

BODY_SECONDS = 20.0
MIN_BYTES_PER_SECOND = 4096
"""A connection is held for a slow client, and not for one that stands still."""

Result = TypeVar("Result")
Body = TypeVar("Body", bound=Wire)


class BodyLimits(Protocol):
    """The part of `Service` that limits bodies."""

    @property
    def settings(self) -> ServerSettings: ...
    @property
    def bodies(self) -> BodyBudget: ...
    @property
    def workers(self) -> WorkerPool: ...


class UploadLimits(Protocol):
    """The part of `Service` that limits uploads into memory."""

    @property
    def settings(self) -> ServerSettings: ...
    @property
    def uploads(self) -> BodyBudget: ...


@asynccontextmanager
async def uploaded(service: UploadLimits, http: Request) -> AsyncIterator[bytes]:
    """Yield the body of an upload, which counts among all uploads until it is left. Raises as `read_body`, and
    EngineFull."""
    with service.uploads.reserve() as grow:
        yield await read_body(http, service.settings.max_adapter_bytes, "server.max_adapter_bytes", grow=grow)


async def read_body(
    http: Request,
    max_bytes: int,
    setting: str = "server.max_body_bytes",
    *,
    grow: Callable[[int], None] = lambda _: None,
) -> bytes:
    """Return the whole body. Raises BodyTooLarge above `max_bytes`, the value of `setting`, and BodyTooSlow.

    `grow` gets the number of bytes so far.
    """
    body = bytearray()
    async for chunk in bounded_chunks(http, max_bytes, setting):
        body += chunk
        grow(len(body))
    return bytes(body)


async def bounded_chunks(http: Request, max_bytes: int, setting: str) -> AsyncGenerator[bytes, None]:
    """Yield the body as it arrives. Raises BodyTooLarge as `read_body` does.

    Raises BodyTooSlow below `MIN_BYTES_PER_SECOND` after `BODY_SECONDS`.
    """
    stream, num_bytes = aiter(http.stream()), 0
    announced = announced_bytes(http.headers)
    ends = asyncio.get_running_loop().time() + BODY_SECONDS
    while True:
        if num_bytes > max_bytes or max_bytes < announced < math.inf:
            raise BodyTooLarge(f"the request body is larger than {max_bytes} bytes; raise {setting}")
        try:
            async with asyncio.timeout_at(ends + num_bytes / MIN_BYTES_PER_SECOND):
                chunk = await anext(stream, None)
        except TimeoutError as error:
            raise BodyTooSlow(
                f"{num_bytes} bytes of the request body came in time; send at least {MIN_BYTES_PER_SECOND} a second"
            ) from error
        if chunk is None:
            return
        num_bytes += len(chunk)
        if num_bytes <= max_bytes:
            yield chunk


async def counted(chunks: AsyncGenerator[bytes, None], grow: Callable[[int], None]) -> AsyncGenerator[bytes, None]:
    """Yield `chunks`, and tell `grow` their bytes so far before each."""
    num_bytes = 0
    async for chunk in chunks:
        num_bytes += len(chunk)
        grow(num_bytes)
        yield chunk


async def received(service: BodyLimits, http: Request, read: Callable[[bytes], Result]) -> Result:
    """Return what `read` makes of the body; it runs on a thread if the body is long, while the client waits.

    Raises BodyTooLarge, BodyTooSlow, EngineFull, and what `read` raises.
    """
    with service.bodies.reserve() as grow:
        body = await read_body(http, service.settings.max_body_bytes, grow=grow)
        if len(body) * SECONDS_PER_BYTE <= SECONDS_ON_LOOP:
            return read(body)
        return await while_connected(http.receive, service.workers.run(partial(read, body)))


async def body_of(service: BodyLimits, http: Request, schema: type[Body]) -> Body:
    """Return the body as `schema`; no body is an empty object. Raises as `received`, and InvalidRequest.

    The fields of an act are noted.
    """
    parsed = await received(service, http, lambda body: parse_body(body or b"{}", schema))
    context = current_request.get()
    if context is not None and context.act is not None:
        note_values(parsed.model_dump(exclude_unset=True))
    return parsed


def json_response(wire: BaseModel, status: int = 200) -> Response:
    return Response(wire.model_dump_json(exclude_unset=True), status, media_type="application/json")


def error_response(error: Failure, answer: BaseModel | None = None) -> Response:
    """Return the response of a failed request, with `answer` in place of OpenAI's form if given."""
    if (context := current_request.get()) is not None:
        context.refusal = error.message
    response = json_response(answer or error.answer, error.status)
    response.headers.update(error.headers)
    return response


def announced_bytes(headers: Mapping[str, str]) -> float:
    """Return the length of the body that follows the headers; infinite if only its end will show it."""
    if "transfer-encoding" in headers:
        return math.inf
    return int(headers.get("content-length", "0"))


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`, which is cancelled if the client leaves or the request's time is over before.

    The body must have been read before. Raises ClientDisconnect, DeadlineExceeded, Draining.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_wait_for_disconnect(receive))
    context = current_request.get()
    if context is not None:
        context.give_up = watching.cancel
        if context.is_given_up:  # between the first event of a stream and its response
            watching.cancel()
    try:
        deadline = None if context is None else context.deadline
        seconds = None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
        await asyncio.wait((working, watching), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if watching.cancelled():
            raise Draining("the server shut down before the answer was complete; send the request again", 1)
        if watching.done():
            raise ClientDisconnect
        raise DeadlineExceeded(
            "the answer was not complete in its time; ask for fewer tokens, send a longer x-request-timeout or raise "
            "server.request_seconds"
        )
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


MAX_FIELD_BYTES = 4096
MAX_FIELDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    file_name: str
    content: bytes
    """Bytes of the file."""
    fields: dict[str, str]


def is_form(http: Request) -> bool:
    return http.headers.get("content-type", "").lower().startswith("multipart/form-data")


async def read_form(http: Request, max_bytes: int, setting: str, *, grow: Callable[[int], None]) -> Form:
    """Read a form with one file. Raises BodyTooLarge as `read_body` does, InvalidRequest. `grow` as there."""
    chunks = counted(bounded_chunks(http, max_bytes, setting), grow)
    parser = MultiPartParser(http.headers, chunks, max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
    try:
        parsed = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the form cannot be read: {error.message}") from error
    try:
        files = [item for item in parsed.values() if isinstance(item, UploadFile)]
        if not files:
            raise InvalidRequest("the form has no file; send the adapter's file as one of its parts", "file")
        fields = {name: item for name, item in parsed.items() if isinstance(item, str)}
        return Form(file_name=files[0].filename or "", content=await files[0].read(), fields=fields)
    finally:
        await parsed.close()
