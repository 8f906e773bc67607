"""The front as an ASGI application: one address before several workers, which answer as one server would.

What generates goes to one worker (`relay.py`), and what an id names to the worker that gave the id. What operators
change goes to the leader, rank 0, and then to all others; what steers training to the leader alone, since the workers
of a run agree by themselves. Answers that count are added up. Everything else is the leader's to answer.

Host, origin, key and role are checked here before a body is read, as on one server; the worker checks the key again.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from pydantic_core import from_json, to_json
from starlette.datastructures import Headers, State
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parallm.distributed.front import reports, routes
from parallm.distributed.front.affinity import read_prompt
from parallm.distributed.front.connection import Lost, NotReached
from parallm.distributed.front.relay import HOP_BY_HOP, Answer, Forwarded, Refused, Relay, no_worker
from parallm.distributed.front.workers import NoWorker, Worker, Workers
from parallm.server.connection import BODY_SECONDS, error_response, read_body
from parallm.server.failures import BodyTooSlow, Draining
from parallm.server.operation.acts import ActLog
from parallm.server.operation.auth import StoredKey, authorize
from parallm.server.operation.middleware import Drain, Origins, RequestMiddleware
from parallm.server.operation.request_context import current_request
from parallm.server.operation.request_metrics import HttpMetrics
from parallm.server.request_limits import MAX_BODIES, BodyBudget
from parallm.server.settings import ServerSettings

NOT_FOR_WORKERS = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"origin", b"referer", b"x-request-id"}
"""Headers that end here: what a browser says of its page has been judged, and bodies are sent whole."""
SECONDS_UNWATCHED = 0.02
JSON, PLAIN = b"application/json", b"text/plain; version=0.0.4; charset=utf-8"
Handler = Callable[[Forwarded, Headers], Coroutine[Any, Any, None]]


class Front:
    """Hands requests to `workers`. Each waits for one at most `hold_seconds`."""

    def __init__(
        self, workers: Workers, settings: ServerSettings, keys: tuple[StoredKey, ...], hold_seconds: float
    ) -> None:
        self._workers = workers
        self._settings = settings
        self._keys = keys
        self._hold_seconds = hold_seconds
        self._relay = Relay(workers)
        self._bodies = BodyBudget(MAX_BODIES * settings.max_body_bytes)
        self._changes = asyncio.Lock()
        """One change of operators at a time, so that all workers get them in one order."""
        self._metrics, self._drain = HttpMetrics(), Drain()
        self.state = State({"drain": self._drain})
        app: ASGIApp = self._respond
        if settings.cors_origins:
            allowed = list(settings.cors_origins)
            app = CORSMiddleware(app, allow_origins=allowed, allow_methods=["*"], allow_headers=["*"])
        origins = Origins(settings, has_keys=bool(keys))
        self._app = RequestMiddleware(
            app, request_metrics=self._metrics, drain=self._drain, origins=origins, acts=ActLog()
        )
        self._handlers: Mapping[routes.Way, Handler] = {
            "one": self._to_one,
            "owner": self._to_owner,
            "leader": self._to_leader,
            "all": self._to_all,
            "sum": self._to_sum,
            "metrics": self._to_metrics,
            "probe": self._probe,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, read it and hand it on, until the client leaves."""
        route, headers = routes.find(scope["method"], scope["path"]), Headers(scope=scope)
        context = current_request.get()
        assert context is not None, "RequestMiddleware is around every request"
        context.route = route.path
        authorize(route.role, headers, self._keys, self._settings)
        if self._drain.is_draining and route.way in ("one", "all"):
            seconds = math.ceil(self._settings.drain_seconds)
            raise Draining(f"the server shuts down and takes no new requests; try again in {seconds} s", seconds)
        try:
            with self._bodies.reserve() as grow:
                body = await self._read(scope, receive, route, grow)
                request = self._forwarded(scope, context.request_id, body, send)
                await _unless_left(receive, self._handlers[route.way](request, headers))
        except ClientDisconnect:
            pass
        except Refused as refused:
            await error_response(refused.failure)(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive, route: routes.Route, grow: Callable[[int], None]) -> bytes:
        """Return the body. Raises BodyTooLarge, BodyTooSlow, EngineFull, ClientDisconnect."""
        setting = "max_adapter_bytes" if route.role == "admin" else "max_body_bytes"
        limit = int(getattr(self._settings, setting))
        first: Message | None = None
        try:
            async with asyncio.timeout(BODY_SECONDS):
                first = await receive()
        except TimeoutError as error:
            raise BodyTooSlow(f"no byte of the request body came within {BODY_SECONDS:g} s") from error
        body: bytes = first.get("body", b"")
        if first["type"] == "http.request" and not first.get("more_body", False) and len(body) <= limit:
            return body  # at a tenth of the cost of what follows, which bounds the time between chunks, too

        async def replay() -> Message:
            nonlocal first
            message, first = first, None
            return message or await receive()

        if route.role == "admin":  # perhaps an adapter, which is larger than all bodies of others together may be
            return await read_body(Request(scope, replay), limit, setting)
        return await read_body(Request(scope, replay), limit, setting, grow=grow)

    def _forwarded(self, scope: Scope, request_id: str, body: bytes, send: Send) -> Forwarded:
        headers = [
            pair
            for pair in scope["headers"]
            if pair[0] not in NOT_FOR_WORKERS and not pair[0].startswith(b"sec-fetch-")
        ]
        headers.append((b"x-request-id", request_id.encode()))
        if body or scope["method"] in ("POST", "PUT"):
            headers.append((b"content-length", b"%d" % len(body)))
        query = scope["query_string"]
        return Forwarded(
            method=scope["method"],
            path=scope["path"],
            target=scope["raw_path"] + (b"?" + query if query else b""),
            headers=headers,
            body=body,
            until=asyncio.get_running_loop().time() + self._hold_seconds,
            send=send,
        )

    async def _to_one(self, request: Forwarded, headers: Headers) -> None:
        await self._relay.hand_on(request, read_prompt(request.body, headers.get("x-session-id")))

    async def _to_owner(self, request: Forwarded, headers: Headers) -> None:
        """Ask the worker that gave the id; all if none is known to have, since one may have it all the same."""
        owner = self._relay.owners.find(routes.parameter(request.method, request.path) or _id_in(request.body))
        workers = [owner] if owner is not None and owner.is_up else await self._some(request)
        answers = await self._ask(request, workers)
        good = [answer for answer in answers if answer.status < 300]
        await _give(request, reports.sum_of(good) if len(good) > 1 else (good or answers)[0])

    async def _to_leader(self, request: Forwarded, headers: Headers) -> None:
        """Views are the same at all workers, and the others answer while the leader is away."""
        workers = await (self._some(request) if request.method in ("GET", "HEAD") else self._leader(request))
        await _give(request, (await self._ask(request, workers[:1]))[0])

    async def _to_sum(self, request: Forwarded, headers: Headers) -> None:
        answers = await self._ask(request, await self._some(request))
        refusal = next((answer for answer in answers if answer.status >= 300), None)
        await _give(request, refusal or reports.sum_of(answers))

    async def _to_all(self, request: Forwarded, headers: Headers) -> None:
        """Let the leader make a change, then all others, and answer as the leader has. All must be there."""
        async with self._changes:
            leader, *others = await self._everyone(request)
            answer = (await self._ask(request, [leader]))[0]
            if answer.status < 300:
                for worker, own in zip(others, await self._ask(request, others), strict=True):
                    if own.status >= 300:
                        raise Refused(
                            502,
                            "workers_differ",
                            f"worker {leader.rank} has made this change, and worker {worker.rank} has answered "
                            f"{own.status} {own.body[:500].decode(errors='replace')}; make it again",
                        )
        await _give(request, answer)

    async def _to_metrics(self, request: Forwarded, headers: Headers) -> None:
        workers = await self._some(request)
        answers = await self._ask(request, workers)
        refusal = next((answer for answer in answers if answer.status >= 300), None)
        if refusal is not None:
            await _give(request, refusal)
        elif dict(answers[0].headers).get(b"content-type", b"").startswith(JSON):
            values = {str(worker.rank): from_json(answer.body) for worker, answer in zip(workers, answers, strict=True)}
            await request.answer(200, [(b"content-type", JSON)], to_json(reports.joined(values)))
        else:
            texts = {str(worker.rank): answer.body.decode() for worker, answer in zip(workers, answers, strict=True)}
            own = reports.own_text(self._metrics.registry, self._workers)
            text = reports.labelled({**texts, "front": own})
            await request.answer(200, [(b"content-type", PLAIN)], text.encode())

    async def _probe(self, request: Forwarded, headers: Headers) -> None:
        """Alive as long as it answers; ready with one worker."""
        up = [worker.rank for worker in self._workers.up]
        if request.path == "/ready" and not up:
            raise no_worker("no worker is ready")
        value = {"status": "ready" if request.path == "/ready" else "ok", "workers": up}
        await request.answer(200, [(b"content-type", JSON)], to_json(value))

    async def _some(self, request: Forwarded) -> Sequence[Worker]:
        return await self._wait_for(list, request, "no worker is ready")

    async def _leader(self, request: Forwarded) -> Sequence[Worker]:
        return await self._wait_for(self._with_leader, request, "the leader, which this is for, is away")

    async def _everyone(self, request: Forwarded) -> Sequence[Worker]:
        return await self._wait_for(self._if_all, request, "a change is made at all workers, and not all are ready")

    async def _wait_for(
        self, wanted: Callable[[Sequence[Worker]], Sequence[Worker]], request: Forwarded, message: str
    ) -> Sequence[Worker]:
        try:
            return await self._workers.wait_for(wanted, request.until)
        except NoWorker as error:
            raise no_worker(message) from error

    def _with_leader(self, up: Sequence[Worker]) -> Sequence[Worker]:
        return up if up and up[0] is self._workers.all[0] else ()

    def _if_all(self, up: Sequence[Worker]) -> Sequence[Worker]:
        return up if len(up) == len(self._workers.all) else ()

    async def _ask(self, request: Forwarded, workers: Sequence[Worker]) -> list[Answer]:
        """Return the answers of these workers. One that is lost answers 502: it may have done what was asked."""

        async def ask(worker: Worker) -> Answer:
            try:
                return Answer(*await worker.ask(request.method, request.target, request.headers, request.body))
            except Lost as lost:
                self._workers.lose(worker)
                if isinstance(lost, NotReached):
                    failure = no_worker(f"worker {worker.rank} cannot be reached").failure
                else:
                    failure = Refused(502, "worker_lost", f"worker {worker.rank} was lost before its answer").failure
                return Answer(failure.status, [(b"content-type", JSON)], failure.answer.model_dump_json().encode())

        return await asyncio.gather(*map(ask, workers))


async def _give(request: Forwarded, answer: Answer) -> None:
    await request.answer(answer.status, answer.headers, answer.body)


async def _unless_left(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, which ends if the client leaves. Raises ClientDisconnect, Draining, and what `work` raises.

    Whether the client is there is looked at from `SECONDS_UNWATCHED` on, since that costs a short request a tenth.
    """
    task, context, loop = asyncio.current_task(), current_request.get(), asyncio.get_running_loop()
    assert task is not None, "a server runs each request in a task"
    assert context is not None, "RequestMiddleware is around every request"
    watching: asyncio.Task[None] | None = None
    is_over = False

    def stop(_: object = None) -> None:
        if not is_over:
            task.cancel()

    def watch() -> None:
        nonlocal watching
        watching = asyncio.ensure_future(_leaving(receive))
        watching.add_done_callback(stop)

    timer = loop.call_later(SECONDS_UNWATCHED, watch)
    context.give_up = stop
    try:
        await work
    except asyncio.CancelledError:
        if watching is not None and watching.done():
            task.uncancel()
            raise ClientDisconnect from None
        if context.is_given_up:
            task.uncancel()
            raise Draining("the server shut down before the answer was complete; send it again", 1) from None
        raise
    finally:
        is_over = True
        timer.cancel()
        if watching is not None:
            watching.cancel()


async def _leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _id_in(body: bytes) -> str:
    """Return the id in a body; empty if there is none, which a worker will refuse."""
    try:
        value = from_json(body)
    except ValueError:
        return ""
    return str(value.get("id", "")) if isinstance(value, dict) else ""
