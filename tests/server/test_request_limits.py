"""Long work of requests, and whom it may hold up."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from fastapi.testclient import TestClient

from parallm.errors import EngineFull
from parallm.server.operation.request_context import RequestContext, current_request
from parallm.server.request_limits import (
    MAX_BODIES,
    MAX_UNCOUNTED_BYTES,
    SECONDS_ON_LOOP,
    THREADS,
    BodyBudget,
    WorkerPool,
)
from tests.server.conftest import make_app

Work = Callable[[], Any]


async def run_for(client: str, pool: WorkerPool, function: Work, **options: Any) -> Any:
    current_request.set(RequestContext(request_id="1", address=client))
    return await pool.run(function, **options)


def begin(client: str, pool: WorkerPool, function: Work, **options: Any) -> "asyncio.Task[Any]":
    return asyncio.create_task(run_for(client, pool, function, **options))


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


def test_a_client_with_much_to_do_holds_up_itself_alone(gate: threading.Event) -> None:
    async def main() -> tuple[list[bool], str]:
        pool = WorkerPool()
        busy = [begin("busy", pool, partial(gate.wait, 10)) for _ in range(3 * THREADS)]
        other = await asyncio.wait_for(run_for("other", pool, lambda: "done"), 5)
        done = [task.done() for task in busy]
        gate.set()
        await asyncio.gather(*busy)
        return done, other

    assert asyncio.run(main()) == ([False] * 3 * THREADS, "done")


def test_a_client_that_leaves_has_no_second_turn_before_its_work_ends(gate: threading.Event) -> None:
    async def main() -> tuple[bool, str]:
        pool, began = WorkerPool(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def work() -> None:
            loop.call_soon_threadsafe(began.set)
            gate.wait(10)

        left = begin("a", pool, work)
        await began.wait()
        left.cancel()
        following = begin("a", pool, lambda: "done")
        await asyncio.gather(left, return_exceptions=True)
        for _ in range(5):
            await asyncio.sleep(0)
        is_early = following.done()
        gate.set()
        return is_early, await asyncio.wait_for(following, 5)

    assert asyncio.run(main()) == (False, "done")


def test_those_who_leave_while_they_wait_leave_nothing_behind(gate: threading.Event) -> None:
    async def main() -> str:
        pool = WorkerPool()
        busy = [begin(str(place), pool, partial(gate.wait, 10)) for place in range(THREADS)]
        waiting = [begin(client, pool, lambda: None) for client in ("0", "1", "late", "later")]
        for _ in range(5):
            await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        gate.set()
        await asyncio.gather(*busy)
        return str(await asyncio.wait_for(run_for("late", pool, lambda: "done"), 5))

    assert asyncio.run(main()) == "done"


def test_the_time_of_work_counts_from_its_beginning(gate: threading.Event) -> None:
    async def main() -> str:
        pool = WorkerPool()
        with pytest.raises(TimeoutError):
            await run_for("a", pool, partial(gate.wait, 10), max_seconds=0.05)
        waiting = begin("a", pool, lambda: "done", max_seconds=0.05)
        await asyncio.sleep(0.2)
        gate.set()
        return str(await asyncio.wait_for(waiting, 5))

    assert asyncio.run(main()) == "done"


def test_what_is_short_stays_and_errors_come_back() -> None:
    def fail() -> None:
        raise KeyError("a")

    async def main() -> tuple[bool, bool]:
        pool = WorkerPool()
        with pytest.raises(KeyError):
            await pool.run(fail)
        where = threading.current_thread
        short = await pool.run_if_long(where, seconds=SECONDS_ON_LOOP)
        long = await pool.run_if_long(where, seconds=2 * SECONDS_ON_LOOP)
        return short is where(), long is where()

    assert asyncio.run(main()) == (True, False)


def test_large_bodies_have_a_limit_together_and_small_ones_none() -> None:
    budget = BodyBudget(MAX_BODIES * 100_000)
    with budget.reserve() as first, budget.reserve() as second, budget.reserve() as small:
        first(MAX_BODIES * 100_000 - 90_000)
        second(70_000)
        second(90_000)
        with pytest.raises(EngineFull, match=r"bodies of 6400000 bytes are being read, the limit is 6400000; send"):
            second(90_001)
        small(MAX_UNCOUNTED_BYTES)
        assert budget.num_bytes == MAX_BODIES * 100_000
    assert budget.num_bytes == 0


@pytest.mark.parametrize(("length", "status"), [(MAX_UNCOUNTED_BYTES // 2, 400), (MAX_UNCOUNTED_BYTES + 1, 429)])
def test_a_body_counts_while_it_comes_in(
    engine: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, length: int, status: int
) -> None:
    monkeypatch.setattr("parallm.server.service.MAX_BODIES", 0)
    app = make_app(engine, tokenizer)
    client = TestClient(app, base_url="http://localhost")
    answer = client.post("/v1/completions", json={"model": "base", "prompt": "a" * length})
    assert answer.status_code == status, answer.text
