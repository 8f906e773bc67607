"""`POST /v1/warmup`; see `parallm.engine.warm_up`."""

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from parallm.engine.warm_up import PROMPT_TOKENS, warm_up
from parallm.server.connection import body_of, json_response, while_connected
from parallm.server.schemas import Wire
from parallm.server.service import Service
from parallm.types import BASE

MOST_ROWS = 1024


class WarmUpBody(Wire):
    model: str = Field(default=BASE, min_length=1, max_length=512)
    rows: int = Field(default=8, ge=1, le=MOST_ROWS)
    """Up to so many completions at once, from 1 on and twice as many each time."""
    prompt_tokens: int = Field(default=PROMPT_TOKENS, ge=1, le=1_000_000)


class WarmUpAnswer(Wire):
    seconds: dict[str, float]
    """By the number of rows."""


def warm_up_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/warmup")
    async def answer(http: Request) -> Response:
        """Generate for 1, 2, 4 and more rows up to `rows`, and say how long each took; leaves nothing in caches."""
        body = await body_of(service, http, WarmUpBody)
        token = service.tokenizer.encode("0")[-1]
        work = warm_up(
            service.engine.generate, token, model=body.model, rows=body.rows, prompt_tokens=body.prompt_tokens
        )
        seconds = await while_connected(http.receive, work)
        return json_response(WarmUpAnswer(seconds={str(rows): one for rows, one in seconds.items()}))

    return router
