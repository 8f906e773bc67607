"""The router of models: which paths lease a model, and what overlays make of bodies."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest
from starlette.types import Message, Receive, Scope, Send

from parallm.errors import EngineFull, EngineStopped
from parallm.registry.pool import Lease, Pool
from parallm.registry.records import Named, Overlay
from parallm.server.failures import WrongKey
from parallm.server.model_overlays import overlaid
from parallm.server.model_router import LEASING, ModelRouter
from parallm.server.operation.auth import ROLES, StoredKey, owner_key
from parallm.server.operation.middleware import Drain
from parallm.server.operation.request_context import UNIX, RequestContext, current_request
from parallm.server.request_limits import BodyBudget, WorkerPool
from parallm.server.settings import ServerSettings

OF_THIS_PROCESS = frozenset(
    (
        *("/embed", "/predict", "/similarity", "/generate", "/generate/", "//generate"),  # they name no model
        *("/v1/requests/{request_id}/cancel", "/v1/rewards", "/v1/rewards/score"),
        *("/v1/trajectories/{trajectory_id}/reward", "/v1/rl/act", "/v1/rl/rollout", "/v1/predict"),
        *("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"),
        *("/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel"),
        *("/v1/fine_tuning/jobs", "/v1/fine_tuning/jobs/{job_id}/cancel"),
        *("/v1/fine_tuning/jobs/{job_id}/pause", "/v1/fine_tuning/jobs/{job_id}/resume"),
        "/api/show",
    )
)
SYSTEM, QUESTION = {"role": "system", "content": "Rhyme."}, {"role": "user", "content": "2 + 3?"}
PLAIN = {"role": "developer", "content": "Be plain."}
POET = Overlay(
    system="Rhyme.",
    parameters={"temperature": 0, "num_predict": 5, "num_ctx": 64},
    messages=({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}),
)


def test_every_route_that_asks_a_model_to_work_leases_it_or_is_known_not_to() -> None:
    posts = {row.removeprefix("POST ") for row, role in ROLES.items() if role == "inference" and row.startswith("POST")}
    assert posts - LEASING - OF_THIS_PROCESS == set()
    assert posts >= LEASING


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            "/v1/chat/completions",
            {"messages": [QUESTION]},
            {"messages": [SYSTEM, *POET.messages, QUESTION], "temperature": 0, "max_tokens": 5},
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "developer", "content": "x"}, QUESTION],
                "temperature": 1,
                "max_completion_tokens": 9,
            },
            {
                "messages": [{"role": "developer", "content": "x"}, *POET.messages, QUESTION],
                "temperature": 1,
                "max_completion_tokens": 9,
            },
        ),
        ("/v1/completions", {"prompt": "a"}, {"prompt": "a", "temperature": 0, "max_tokens": 5}),
        (
            "/v1/responses",
            {"input": "2 + 3?"},
            {
                "input": [*POET.messages, QUESTION],
                "instructions": "Rhyme.",
                "temperature": 0,
                "max_output_tokens": 5,
            },
        ),
        (
            "/api/chat",
            {"messages": [QUESTION], "options": {"temperature": 1}},
            {
                "messages": [SYSTEM, *POET.messages, QUESTION],
                "options": {"temperature": 1, "num_predict": 5, "num_ctx": 64},
            },
        ),
        ("/api/chat", {"messages": []}, {"messages": [], "options": dict(POET.parameters)}),
        ("/api/generate", {"prompt": "a"}, {"prompt": "a", "system": "Rhyme.", "options": dict(POET.parameters)}),
        ("/api/generate", {"prompt": "a", "raw": True}, {"prompt": "a", "raw": True, "options": dict(POET.parameters)}),
        ("/tokenize", {"prompt": "a"}, {"prompt": "a"}),
    ],
)
def test_an_overlay_adds_what_a_body_does_not_say(
    path: str, body: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    assert overlaid(path, body, POET) == expected


class OneModel:
    """Service and pool of a router: a model with its number of leases."""

    settings = ServerSettings()
    keys = (StoredKey("client", "inference", b""),)
    workers = WorkerPool()

    def __init__(self) -> None:
        self.text = b'{"model": "tiny"}'
        self.num_leases = 0
        self.bodies = BodyBudget(1 << 20)
        self.loading = 0
        """Bytes of bodies when the model was last asked for."""
        self.asking: asyncio.Task[None] | None = None

    def serves(self, name: str) -> bool:
        return False

    async def describe(self, name: str) -> Named:
        return Named(name=name, model=None)  # type: ignore[arg-type]  # nobody looks at it

    async def lease(self, named: Named, keep_alive: float | None = None) -> Lease:
        self.num_leases += 1
        self.loading = self.bodies.num_bytes
        if self.asking is not None:
            self.asking.cancel()
        return Lease(None, 0.0, self._release)

    def _release(self) -> None:
        self.num_leases -= 1


async def ask(model: OneModel, **scope: Any) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (model.num_leases, model.bodies.num_bytes) == (1, 0)
        assert (await receive())["body"] == model.text

    body: list[Message] = [{"type": "http.request", "body": model.text, "more_body": False}]

    async def receive() -> Message:
        return body.pop() if body else await asyncio.Event().wait() and {}

    async def send(message: Message) -> None:
        raise EngineStopped

    current_request.set(RequestContext(request_id="a"))
    router = ModelRouter(app, service=model, pool=cast(Pool, model), drain=Drain())
    headers = [(b"authorization", b"Bearer secret")]
    await router(
        {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, **scope}, receive, send
    )


def test_the_key_of_a_unix_socket_counts_there_beside_the_servers() -> None:
    model = OneModel()
    asyncio.run(ask(model, **{UNIX: (owner_key("secret"),)}))
    with pytest.raises(WrongKey):
        asyncio.run(ask(model))
    assert model.num_leases == 0


def test_a_request_that_is_cancelled_at_the_moment_of_its_lease_gives_it_back() -> None:
    async def cancelled() -> int:
        model = OneModel()
        model.asking = asyncio.create_task(ask(model, **{UNIX: (owner_key("secret"),)}))
        await asyncio.gather(model.asking, return_exceptions=True)
        assert model.asking.cancelled()
        return model.num_leases

    assert asyncio.run(cancelled()) == 0


def test_a_body_counts_while_its_model_loads() -> None:
    model = OneModel()
    model.text = b'{"model": "tiny", "prompt": "%s"}' % (b"a" * 100_000)
    asyncio.run(ask(model, **{UNIX: (owner_key("secret"),)}))
    assert (model.loading, model.bodies.num_bytes) == (len(model.text), 0)
    model.bodies = BodyBudget(90_000)
    with pytest.raises(EngineFull):
        asyncio.run(ask(model, **{UNIX: (owner_key("secret"),)}))
