"""Work whose answers nobody reads, so that what is made once for each number of rows is made before clients come."""

import time
import uuid

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from parallm.server.connection import body_of, json_response, while_connected
from parallm.server.schemas import Wire
from parallm.server.service import Service
from parallm.types import BASE, GenerationRequest, SamplingParams

MOST_ROWS = 1024
TOKENS = 4
"""Of each completion: the first comes from the prompt, and the others from steps."""


class WarmUpBody(Wire):
    model: str = Field(default=BASE, min_length=1, max_length=512)
    rows: int = Field(default=8, ge=1, le=MOST_ROWS)
    """Up to so many completions at once, from 1 on and twice as many each time."""
    prompt_tokens: int = Field(default=64, ge=1, le=1_000_000)


class WarmUpAnswer(Wire):
    seconds: dict[str, float]
    """By the number of rows."""


def warm_up_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/warmup")
    async def warm_up(http: Request) -> Response:
        """Generate for 1, 2, 4 and more rows up to `rows`, and say how long each took; leaves nothing in caches."""
        body = await body_of(service, http, WarmUpBody)
        seconds = {}
        for rows in row_counts(body.rows):
            began = time.perf_counter()
            await while_connected(http.receive, service.engine.generate(_request(service, body, rows)))
            seconds[str(rows)] = round(time.perf_counter() - began, 6)
        return json_response(WarmUpAnswer(seconds=seconds))

    return router


def row_counts(most: int) -> list[int]:
    """Powers of two below `most`, and `most`."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def _request(service: Service, body: WarmUpBody, rows: int) -> GenerationRequest:
    name = uuid.uuid4().hex
    token = service.tokenizer.encode("0")[-1:]
    return GenerationRequest(
        request_id=f"warmup-{name}",
        prompt_tokens=token * body.prompt_tokens,
        sampling=SamplingParams(max_tokens=TOKENS, ignore_eos=True),
        n=rows,
        model=body.model,
        is_continued=False,
        cache_salt=name,  # else the second prompt would be known from the first
    )
