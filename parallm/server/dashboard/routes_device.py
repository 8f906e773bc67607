"""`/v1/device`: what the device does for whom, over time and now. No text of a request is here."""

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest, Unavailable
from parallm.metrics.pulse import NUM_MINUTES, Pulses
from parallm.server.dashboard.answers import answer_made, json_answer
from parallm.server.service import Service

MAX_TIMELINE_SECONDS = 600.0
DEFAULT_MINUTES = 15


def device_routes(service: Service) -> APIRouter:
    router, watching = APIRouter(), service.watching

    @router.get("/v1/device")
    async def device(http: Request, minutes: int = DEFAULT_MINUTES) -> Response:
        """Load, memory and time of the process over the last minutes: by second up to 15, else by minute."""
        if not 1 <= minutes <= NUM_MINUTES:
            raise InvalidRequest(f"minutes={minutes} should be from 1 to {NUM_MINUTES}", "minutes")
        found, report = watching.pulse.pulses(minutes), service.device
        now = {
            "now": round(time.time(), 3),
            "name": watching.device_name,
            "seconds": {} if report is None else dict(report.seconds()),
            "shares": {} if report is None else dict(report.shares()),
            "memory": {} if report is None else dict(report.memory()),
        }
        return await service.workers.run(lambda: answer_made(http, lambda: {**now, **_pulses(found)}))

    @router.get("/v1/device/timeline")
    async def timeline(http: Request, seconds: float = 60.0) -> Response:
        """Spans of the device's work: index of the kind, seconds from now (negative) to its beginning, and its length.

        Neighbours of one kind are joined where there are many.
        """
        if not 0 < seconds <= MAX_TIMELINE_SECONDS:
            raise InvalidRequest(
                f"seconds={seconds:g} should be above 0 and at most {MAX_TIMELINE_SECONDS:g}", "seconds"
            )
        now = time.perf_counter()
        spans = [] if service.spans is None else service.spans(now - seconds)
        work = sorted(
            {span.work for span in spans}, key=("serving", "rollout", "learning", "encoding", "loading").index
        )
        shown = [
            [
                work.index(span.work),
                round(max(span.start - now, -seconds), 4),
                _length(span.start, span.end, now - seconds),
            ]
            for span in spans
        ]
        return json_answer(http, {"now": round(time.time(), 3), "work": work, "spans": shown})

    @router.get("/v1/device/rows")
    async def rows(http: Request) -> Response:
        """The completions that decode or wait now, one by one."""
        if service.rows is None:
            raise Unavailable("this process does not list its completions one by one")
        load, found = service.engine.stats(), await service.rows()
        return json_answer(
            http,
            {
                "max_rows": load.max_rows,
                "waiting": load.num_waiting,
                "held": service.gateway.num_held,
                "rows": [
                    {
                        "id": row.request_id,
                        "index": row.index,
                        "traffic": row.traffic,
                        "model": row.model,
                        "is_running": row.is_running,
                        "prompt_tokens": row.num_prompt_tokens,
                        "sampled": row.num_sampled,
                        "max_tokens": row.max_tokens,
                        "seconds": round(row.seconds, 2),
                    }
                    for row in found
                ],
            },
        )

    return router


def _pulses(found: Pulses) -> dict[str, Any]:
    columns = {name: values.tolist() for name, values in found.columns.items()}
    return {"bucket": found.bucket, "times": found.times.round(1).tolist(), "columns": columns}


def _length(start: float, end: float, earliest: float) -> float:
    return round(end - max(start, earliest), 4)
