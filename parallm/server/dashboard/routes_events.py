"""`/v1/events`: what happens in this process, as it happens, for as long as somebody watches.

A watcher is no request that a server which ends has to wait for, and has no deadline.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from parallm.metrics.history import STEP
from parallm.metrics.live_run import LiveRun
from parallm.metrics.news import LOST, MAX_WATCHERS, Event, News, Watcher, event_of
from parallm.metrics.watching import Watching
from parallm.server.dashboard.runs import live_run
from parallm.server.failures import TooManyWatchers
from parallm.server.operation.middleware import Drain
from parallm.server.service import Service

SECONDS_BETWEEN_SIGNS = 15.0
"""A comment line goes out after so long without an event, so that no proxy takes the stream for dead."""
SIGN = b": still here\n\n"
MAX_REPLAYED = 200
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def event_routes(service: Service, drain: Drain) -> APIRouter:
    router, watching = APIRouter(), service.watching

    @router.get("/v1/events")
    async def events(policy: str | None = None, since: int = -1, epoch: str = "") -> Response:
        """Steps, statuses, evaluations, the pulse, happenings and log lines, as server-sent events.

        The first one is `hello`. With the `epoch` and the last step of a history the steps that it lacks follow;
        `lost` says that there are too many, or that it is another history.
        """
        if watching.news.num_watchers >= MAX_WATCHERS:
            raise TooManyWatchers(f"{MAX_WATCHERS} pages watch already, which is the limit; close one")
        run = live_run(watching, policy)
        first = [_hello(service, run), *(() if run is None else _missed(run, since, epoch))]
        return EventStream(watching.news, drain, first)

    return router


class EventStream(Response):
    """First these events, then all news, until the client leaves or the server ends."""

    def __init__(self, news: News, drain: Drain, first: list[Event]) -> None:
        super().__init__(media_type="text/event-stream", headers=HEADERS)
        del self.headers["content-length"]
        self._news = news
        self._drain = drain
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._news.watch() as watcher:
            self._drain.watch(lambda: watcher.end("draining"))
            for event in self._first:
                watcher.put(event)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            sending = asyncio.create_task(_send_all(watcher, send))
            leaving = asyncio.create_task(_wait_for_disconnect(receive))
            try:
                await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                sending.cancel()
                leaving.cancel()
                results = await asyncio.gather(sending, leaving, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result


async def _send_all(watcher: Watcher, send: Send) -> None:
    async for text in _texts(watcher):
        await send({"type": "http.response.body", "body": text, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _texts(watcher: Watcher) -> AsyncIterator[bytes]:
    with suppress(StopAsyncIteration):
        while True:
            event = await watcher.next(SECONDS_BETWEEN_SIGNS)
            yield SIGN if event is None else event.text


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _hello(service: Service, run: LiveRun | None) -> Event:
    watching: Watching = service.watching
    status: Mapping[str, Any] = {"policy": "", "state": service.status().state} if run is None else run.status_row()
    view = None if run is None else run.history.view()
    data = {
        "policy": "" if run is None else run.policy,
        "epoch": None if view is None else view.epoch,
        "last": None if view is None else view.last,
        "now": round(time.time(), 3),
        "status": status,
        "pulse": watching.pulse.last,
        "last_step_row": None if run is None else run.history.last_row,
    }
    return event_of("hello", data)


def _missed(run: LiveRun, since: int, epoch: str) -> Iterator[Event]:
    """Yield the steps after `since`, or `lost` where the page has to read the history anew."""
    view = run.history.view()
    if since < 0 and not epoch:
        return
    if epoch != view.epoch:
        yield event_of(LOST, {})
        return
    rows = view.rows(since, view.last or 0, None, MAX_REPLAYED)
    if rows.has_more:
        yield event_of(LOST, {})
        return
    for index, step in enumerate(rows.steps):
        numbers = {name: float(values[index]) for name, values in rows.columns.items() if not np.isnan(values[index])}
        yield event_of("step", {"policy": run.policy, STEP: int(step), **numbers})
