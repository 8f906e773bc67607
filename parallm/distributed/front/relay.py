"""Hands a request to one worker and its answer to the client, and to another worker if the first one is lost.

A request is sent again as long as the client has seen nothing of its answer. Bytes of streams are handed on as they
come, whole events at a time, so that the last event of a stream that a worker cannot end is an error.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from pydantic_core import from_json, to_json
from starlette.types import Send

from parallm.distributed.front.affinity import Affinity, Prompt
from parallm.distributed.front.connection import Connection, Headers, Lost, NotReached
from parallm.distributed.front.workers import NoWorker, Worker, Workers
from parallm.server.failures import Failure
from parallm.server.operation.request_context import current_request

MAX_LOST = 3
"""Workers that one request may lose: beyond it the request may be what ends them."""
MAX_WAITING = 4096
"""Requests that may wait for a worker."""
VERSION_SECONDS = 2.0
"""Time in which every worker has published what the first of them has."""
SECONDS_BETWEEN_TRIES = 0.05
RETRY_SECONDS = 5
"""Value of Retry-After where no worker was there."""
MAX_IDS = 1 << 17
ID = re.compile(rb'"(?:id|request_id)":\s?"([^"\\]{1,512})"')
ID_BYTES = 1024
"""The id of an answer stands at its beginning."""
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
NOT_FOR_CLIENTS = HOP_BY_HOP | {b"date", b"server"}
EVENTS = b"text/event-stream"


class Refused(Exception):
    """The front answers itself."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.failure = Failure(status, code, "server_error", message=message, headers=headers)


def no_worker(message: str) -> Refused:
    return Refused(503, "no_worker", f"{message}; try again later", **{"Retry-After": str(RETRY_SECONDS)})


@dataclass(slots=True, kw_only=True)
class Forwarded:
    """A request as workers get it, and where its answer goes."""

    method: str
    path: str
    target: bytes
    """Path and query as they came."""
    headers: Headers
    """Without Host."""
    body: bytes
    until: float
    """Time of the event loop until which it waits for a worker."""
    send: Send

    def begin(self, connection: Connection, worker: Worker) -> None:
        """Write it to a worker. Raises Lost."""
        connection.send(self.method, self.target, [(b"host", worker.address.authority), *self.headers], self.body)

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, headers)
        await self.more(body, is_last=True)

    async def start(self, status: int, headers: Headers) -> None:
        kept = [pair for pair in headers if pair[0] not in NOT_FOR_CLIENTS]
        await self.send({"type": "http.response.start", "status": status, "headers": kept})

    async def more(self, body: bytes, *, is_last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": not is_last})


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer that the client has not got yet."""

    status: int
    headers: Headers
    body: bytes

    @property
    def is_refusal(self) -> bool:
        """Whether another worker, or the same one later, may do better."""
        return self.status in (429, 503) or (self.status == 404 and b'"model_not_found"' in self.body)


class Owners:
    """Remembers which worker gave an answer, by the answer's id."""

    def __init__(self) -> None:
        self._workers: OrderedDict[str, Worker] = OrderedDict()

    def note(self, name: str, worker: Worker) -> None:
        self._workers[_plain(name)] = worker
        if len(self._workers) > MAX_IDS:
            self._workers.popitem(last=False)

    def note_answer(self, body: bytes, worker: Worker) -> None:
        """Note the id at the beginning of an answer, or of the first event of a stream."""
        if match := ID.search(body, 0, ID_BYTES):
            self.note(match[1].decode(errors="replace"), worker)

    def find(self, name: str) -> Worker | None:
        """Return the worker of an answer, or of its trajectory `ANSWER-CHOICE`."""
        name = _plain(name)
        return self._workers.get(name) or self._workers.get(name.rpartition("-")[0])


class Relay:
    """Chooses workers and hands requests to them. Used on the event loop only."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._affinity = Affinity()
        self.owners = Owners()

    async def hand_on(self, request: Forwarded, prompt: Prompt) -> None:
        """Let one worker answer; `request.until` bounds the wait for one. Raises Refused."""
        tried: set[Worker] = set()
        num_lost, began = 0, asyncio.get_running_loop().time()
        while True:
            worker = await self._choose(prompt, tried, request.until)
            try:
                refusal = await self._try(request, prompt, worker)
            except NotReached:
                self._workers.lose(worker)
                continue
            except Lost as error:
                self._workers.lose(worker)
                num_lost += 1
                if num_lost == MAX_LOST:
                    message = f"{num_lost} workers were lost while they had this request"
                    raise Refused(502, "worker_lost", message, **{"x-should-retry": "false"}) from error
                continue
            if refusal is None:
                return
            tried.add(worker)
            if all(other in tried for other in self._workers.up):
                if not await self._may_change(refusal, request, prompt, began):
                    await request.answer(refusal.status, refusal.headers, refusal.body)
                    return
                tried.clear()
                await asyncio.sleep(SECONDS_BETWEEN_TRIES)

    async def _choose(self, prompt: Prompt, tried: set[Worker], until: float) -> Worker:
        if not self._workers.up and self._workers.num_waiting >= MAX_WAITING:
            raise no_worker(f"no worker is ready, and {MAX_WAITING} requests wait for one")
        try:
            worker = await self._workers.find(partial(self._affinity.choose, prompt), tried, until)
        except NoWorker as error:
            raise no_worker("no worker has become ready in time (distributed.front.hold_seconds)") from error
        if prompt.request_id is not None:
            self.owners.note(prompt.request_id, worker)
        return worker

    async def _try(self, request: Forwarded, prompt: Prompt, worker: Worker) -> Answer | None:
        """Ask one worker and hand its answer on. Return a refusal instead. Raises Lost before the first byte."""
        worker.load += prompt.rows
        worker.num_requests += 1
        try:
            connection = await worker.take()
            try:
                request.begin(connection, worker)
                status, headers = await connection.head()
                if not any(name == b"content-length" for name, _ in headers):
                    await self._stream(request, connection, worker, status, headers)
                    return None
                answer = Answer(status, headers, await connection.whole())
            finally:
                worker.give_back(connection)
        finally:
            worker.load -= prompt.rows
        if answer.is_refusal:
            if status == 503:
                self._workers.lose(worker)
            return answer
        self.owners.note_answer(answer.body, worker)
        await request.answer(status, headers, answer.body)
        return None

    async def _stream(
        self, request: Forwarded, connection: Connection, worker: Worker, status: int, headers: Headers
    ) -> None:
        """Hand on an answer as it comes. Raises Lost if nothing of it does."""
        has_events = any(name == b"content-type" and value.startswith(EVENTS) for name, value in headers)
        data = await connection.read()
        self.owners.note_answer(data, worker)
        await request.start(status, headers)
        rest = b""
        try:
            while data:
                end = len(data)
                if has_events:
                    data = rest + data
                    end = data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
                rest = data[end:]
                if end:
                    await request.more(data[:end])
                data = await connection.read()
        except Lost:
            self._workers.lose(worker)
            if not has_events:
                raise ConnectionError("a worker was lost in the middle of an answer") from None
            rest = last_event(request.path, "worker_lost", "the worker was lost before the end of this answer")
        except asyncio.CancelledError:
            context = current_request.get()
            if has_events and context is not None and context.is_given_up:
                text = last_event(request.path, "draining", "the server shut down before the answer was complete")
                await request.more(text, is_last=True)
            raise
        await request.more(rest, is_last=True)

    async def _may_change(self, refusal: Answer, request: Forwarded, prompt: Prompt, began: float) -> bool:
        """Whether workers that have all refused a request may soon take it."""
        now = asyncio.get_running_loop().time()
        if refusal.status == 503:
            return now < request.until
        return refusal.status == 404 and now < began + VERSION_SECONDS and await self._is_next(request, prompt.model)

    async def _is_next(self, request: Forwarded, model: str) -> bool:
        """Whether `model` is a version that a worker has by now, or the one after its newest."""
        name, _, number = model.rpartition("@")
        if not name or not number.isdecimal() or len(number) > 9:
            return False
        versions = [version for worker in self._workers.up for version in await _versions(worker, request, name)]
        return int(number) in versions or int(number) == max(versions, default=-1) + 1


def last_event(path: str, code: str, message: str) -> bytes:
    """Return the event that ends a stream of this route with an error, as one server writes it."""
    if path == "/v1/responses":
        event = {"type": "error", "code": code, "message": message, "param": None}
        return b"event: error\ndata: " + to_json(event) + b"\n\n"
    failure = Failure(503, code, "server_error", message=message)
    return b"data: " + failure.answer.model_dump_json().encode() + b"\n\n"


async def _versions(worker: Worker, request: Forwarded, name: str) -> Sequence[int]:
    """Return the versions of `name` that a worker has, the newest that it serves included."""
    with suppress(Lost, ValueError, KeyError, TypeError):
        status, _, body = await worker.ask("GET", b"/v1/models", _without_length(request.headers))
        if status == 200:
            ids = [str(model["id"]).rpartition("@") for model in from_json(body)["data"]]
            found = [int(number) for own, _, number in ids if own == name and number.isdecimal()]
            return found or ([0] if any(own == "" and number == name for own, _, number in ids) else [])
    return []


def _without_length(headers: Headers) -> Headers:
    return [pair for pair in headers if pair[0] not in (b"content-length", b"content-type")]


def _plain(name: str) -> str:
    """Return the id of an answer as the client that chose it says it."""
    return name.removeprefix("chatcmpl-").removeprefix("cmpl-")
