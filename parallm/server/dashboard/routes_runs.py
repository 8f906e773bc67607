"""`/v1/runs`: histories, evaluations and all else that a run has left to read."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest
from parallm.metrics.history import View
from parallm.server.dashboard.answers import PageHost, large_answer
from parallm.server.dashboard.runs import history_of
from parallm.server.request_limits import WorkerPool

DEFAULT_POINTS = 1024
MAX_POINTS = 2048
MAX_ROWS = 2000


def run_routes(host: PageHost) -> APIRouter:
    router, watching = APIRouter(), host.watching
    readers = WorkerPool()
    """Threads of their own: reading runs keeps no request of a client waiting."""

    @router.get("/v1/runs/{run}/history")
    async def history(
        http: Request,
        run: str,
        policy: str | None = None,
        points: int = DEFAULT_POINTS,
        since: int | None = None,
        until: int | None = None,
        names: str | None = None,
    ) -> Response:
        """Numbers of all steps: minimum, maximum and last of up to `points` groups, or with `since` rows as they are.

        Groups have a power of two of steps and do not move as the run goes on. Another `epoch` than that of an earlier
        answer means that rows were dropped and all is to be read anew.
        """
        if not 1 <= points <= MAX_POINTS:
            raise InvalidRequest(f"points={points} should be from 1 to {MAX_POINTS}", "points")
        view = history_of(watching, run, policy)
        if since is None:
            return await large_answer(http, readers, lambda: bucket_answer(view, points))
        last = (view.last or 0) if until is None else until
        chosen = None if names is None else _known(view, names.split(","))
        return await large_answer(http, readers, lambda: row_answer(view, since, last, chosen))

    return router


def bucket_answer(view: View, points: int) -> dict[str, Any]:
    """Return the history in groups of steps as JSON has it."""
    found = view.buckets(points)
    return {
        "epoch": view.epoch,
        "first": view.first,
        "last": view.last,
        "bucket": found.bucket,
        "starts": found.starts.tolist(),
        "columns": {
            name: {"low": low.tolist(), "high": high.tolist(), "last": last.tolist()}
            for name, (low, high, last) in found.columns.items()
        },
        "constant": found.constant,
    }


def row_answer(view: View, since: int, until: int, names: Sequence[str] | None) -> dict[str, Any]:
    """Return rows as JSON has them."""
    found = view.rows(since, until, names, MAX_ROWS)
    return {
        "epoch": view.epoch,
        "steps": found.steps.tolist(),
        "columns": {name: values.tolist() for name, values in found.columns.items()},
        "more": found.has_more,
    }


def _known(view: View, names: Sequence[str]) -> list[str]:
    """Return the names without those of each row's step. Raises InvalidRequest for a name that no row has."""
    if unknown := [name for name in names if name not in view.columns]:
        raise InvalidRequest(f"no metric {unknown[0][:100]!r} in this run", "names")
    return list(names)
