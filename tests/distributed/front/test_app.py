"""Where each route leads, what all workers answer together, and who may ask."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from bench.fake_worker import FakeWorker

from parallm.distributed.front import routes
from parallm.server.operation.auth import ROLES
from parallm.server.settings import ServerSettings
from tests.distributed.front.conftest import Fronted, paths

WithFront = Callable[..., None]
REWARD, TRAJECTORY = "POST /v1/rewards", "/v1/trajectories/{}/reward"
OK = (200, {"status": "ok"})
UNKNOWN = (400, {"error": {"message": "no answer of that id", "code": "invalid_value"}})


def asked(fake: FakeWorker) -> list[str]:
    return [path for path in paths(fake) if "/v1/chat/" not in path]


def test_every_route_of_a_server_has_a_way() -> None:
    for row in ROLES:
        method, _, path = row.partition(" ")
        route = routes.find(method, path.replace("{", "").replace("}", ""))
        assert route.path == path, row
        assert route.role == ROLES[row]
    assert routes.find("GET", "/nothing").way == "leader"
    assert routes.find("DELETE", "/v1/requests/a/cancel").path is None


def test_ids_with_slashes_are_parameters() -> None:
    assert routes.parameter("POST", "/v1/requests/a/b/cancel") == "a/b"
    assert routes.parameter("POST", "/v1/rewards") == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("request_id", [None, "mine"])
def test_the_id_of_an_answer_leads_to_the_worker_that_gave_it(
    with_front: WithFront, stream: bool, request_id: str | None
) -> None:
    fakes = [FakeWorker("0"), FakeWorker("1")]

    async def test(front: Fronted) -> None:
        fields = {} if request_id is None else {"request_id": request_id}
        for number in range(4):
            response = await front.chat(f"{number} " * 100, stream=stream, **fields)
            first = response.json() if not stream else json.loads(response.text.split("\n\n")[0].removeprefix("data: "))
            name, giver = request_id or first["id"], fakes[int(first["model"])]
            for path in (f"/v1/requests/{name}/cancel", TRAJECTORY.format(f"{name}-0")):
                giver.answers[f"POST {path}"] = OK
                assert (await front.client.post(path, json={"reward": 1})).status_code == 200
            giver.answers[REWARD] = OK
            assert (await front.client.post("/v1/rewards", json={"id": name, "reward": 1})).status_code == 200
            for fake in fakes:
                fake.answers.pop(REWARD, None)

    with_front(test, *fakes)
    assert sum(len(asked(fake)) for fake in fakes) == 12, "the other worker was asked, too"


def test_an_id_that_is_not_known_is_asked_of_all(with_front: WithFront) -> None:
    fakes = [FakeWorker(answers={REWARD: UNKNOWN}), FakeWorker(answers={REWARD: OK})]

    async def test(front: Fronted) -> None:
        response = await front.client.post("/v1/rewards", json={"id": "of an earlier front", "reward": 1})
        assert (response.status_code, response.json()) == OK
        fakes[1].answers[REWARD] = UNKNOWN
        response = await front.client.post("/v1/rewards", json={"id": "of nobody", "reward": 1})
        assert (response.status_code, response.json()) == UNKNOWN

    with_front(test, *fakes)


CHANGE = "POST /v1/adapters/promote"


def test_a_change_is_made_at_the_leader_and_then_at_all_others(with_front: WithFront) -> None:
    fakes = [FakeWorker(answers={CHANGE: (200, {"worker": number})}) for number in range(3)]

    async def test(front: Fronted) -> None:
        response = await front.client.post("/v1/adapters/promote", json={"name": "policy", "version": 3})
        assert (response.status_code, response.json()) == (200, {"worker": 0})

    with_front(test, *fakes)
    assert [asked(fake) for fake in fakes] == [[CHANGE]] * 3
    assert all(fake.requests[0][3] == {"name": "policy", "version": 3} for fake in fakes)


def test_a_change_that_the_leader_refuses_is_made_nowhere(with_front: WithFront) -> None:
    fakes = [FakeWorker(answers={CHANGE: MISSING}), FakeWorker(answers={CHANGE: OK})]

    async def test(front: Fronted) -> None:
        response = await front.client.post("/v1/adapters/promote", json={})
        assert (response.status_code, response.json()) == MISSING

    with_front(test, *fakes)
    assert asked(fakes[1]) == []


MISSING = (404, {"error": {"message": "no such version", "code": "model_not_found"}})


def test_a_change_that_another_worker_refuses_is_told_with_its_name(with_front: WithFront) -> None:
    fakes = [FakeWorker(answers={CHANGE: OK}), FakeWorker(answers={CHANGE: MISSING})]

    async def test(front: Fronted) -> None:
        response = await front.client.post("/v1/adapters/promote", json={})
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "workers_differ"
        assert "worker 1 has answered 404" in response.json()["error"]["message"]
        assert "no such version" in response.json()["error"]["message"]

    with_front(test, *fakes)


def test_changes_come_to_all_workers_in_one_order(with_front: WithFront) -> None:
    fakes = [FakeWorker(answers={CHANGE: OK}) for _ in range(3)]

    async def test(front: Fronted) -> None:
        asking = [front.client.post("/v1/adapters/promote", json={"version": number}) for number in range(20)]
        await asyncio.gather(*asking)

    with_front(test, *fakes)
    orders = [[request[3]["version"] for request in fake.requests] for fake in fakes]
    assert orders[0] == orders[1] == orders[2]
    assert len(orders[0]) == 20


def test_a_change_waits_for_all_workers(with_front: WithFront) -> None:
    there, away = FakeWorker(answers={CHANGE: OK}), FakeWorker(answers={CHANGE: OK, "GET /ready": (503, {})})

    async def test(front: Fronted) -> None:
        asking = asyncio.create_task(front.client.post("/v1/adapters/promote", json={}))
        await asyncio.sleep(0.3)
        assert not asking.done()
        away.answers["GET /ready"] = OK
        assert (await asking).status_code == 200
        assert asked(away) == [CHANGE]

    with_front(test, there, away)


def test_a_change_without_all_workers_is_refused(with_front: WithFront) -> None:
    away = FakeWorker(answers={"GET /ready": (503, {})})

    async def test(front: Fronted) -> None:
        response = await front.client.post("/v1/adapters/promote", json={})
        assert response.status_code == 503
        assert "not all are ready" in response.text

    with_front(test, FakeWorker(answers={CHANGE: OK}), away, hold_seconds=0.3)


def test_training_is_steered_at_the_leader(with_front: WithFront) -> None:
    steers = {"POST /v1/training/pause": OK, "GET /v1/training/status": OK}
    fakes = [FakeWorker(answers=steers), FakeWorker(answers=steers)]

    async def test(front: Fronted) -> None:
        await front.client.post("/v1/training/pause", json={})
        await front.client.get("/v1/training/status")

    with_front(test, *fakes)
    assert [len(asked(fake)) for fake in fakes] == [2, 0]


def test_views_come_from_another_worker_while_the_leader_is_away(with_front: WithFront) -> None:
    answers = {"GET /v1/models": OK, "POST /v1/training/pause": OK}
    leader, other = FakeWorker(answers={**answers, "GET /ready": (503, {})}), FakeWorker(answers=answers)

    async def test(front: Fronted) -> None:
        assert (await front.client.get("/v1/models")).status_code == 200
        response = await front.client.post("/v1/training/pause", json={})
        assert (response.status_code, "the leader" in response.text) == (503, True)

    with_front(test, leader, other, hold_seconds=0.3)
    assert asked(other) == ["GET /v1/models"]


def test_counts_are_added_up(with_front: WithFront) -> None:
    def queue(running: int, is_paused: bool) -> tuple[int, Any]:
        return 200, {"num_running": running, "is_paused": is_paused}

    def splits(requests: int, rewards: int, mean: float | None, *more: Any) -> tuple[int, Any]:
        version = {"num_requests": requests, "num_rewards": rewards, "reward_mean": mean}
        split = {"name": "policy", "shares": {"policy@1": 0.5}, "versions": {"policy@1": version}}
        return 200, {"data": [split, *more]}

    poet = {"name": "poet", "shares": {}, "versions": {}}
    first = {"GET /v1/queue": queue(3, False), "GET /v1/splits": splits(10, 4, 0.5)}
    second = {"GET /v1/queue": queue(4, True), "GET /v1/splits": splits(20, 12, 1.0, poet)}

    async def test(front: Fronted) -> None:
        assert (await front.client.get("/v1/queue")).json() == {"num_running": 7, "is_paused": True}
        data = (await front.client.get("/v1/splits")).json()["data"]
        version = {"num_requests": 30, "num_rewards": 16, "reward_mean": 0.875}
        assert data == [{"name": "policy", "shares": {"policy@1": 0.5}, "versions": {"policy@1": version}}, poet]

    with_front(test, FakeWorker(answers=first), FakeWorker(answers=second))


def test_metrics_name_their_worker(with_front: WithFront) -> None:
    def text(number: int) -> tuple[int, str]:
        return 200, (
            "# HELP a_total A.\n# TYPE a_total counter\n"
            f'a_total{{b="x y"}} {number}\n# HELP c C.\n# TYPE c gauge\nc {number}.5\n'
        )

    fakes = [FakeWorker(answers={"GET /metrics": text(number)}) for number in range(2)]

    async def test(front: Fronted) -> None:
        await front.chat()
        lines = (await front.client.get("/metrics")).text.splitlines()
        start = lines.index("# HELP a_total A.")
        assert lines[start : start + 4] == [
            "# HELP a_total A.",
            "# TYPE a_total counter",
            'a_total{worker="0",b="x y"} 0',
            'a_total{worker="1",b="x y"} 1',
        ]
        assert 'c{worker="1"} 1.5' in lines
        assert 'parallm:front_worker_up{worker="front",rank="1"} 1' in lines
        assert any(line.startswith('http_requests_total{worker="front"') and "chat" in line for line in lines)

    with_front(test, *fakes)


def test_metrics_as_json_are_summed(with_front: WithFront) -> None:
    def values(number: int) -> tuple[int, Any]:
        samples = {"a_total": [{"labels": {"b": "x"}, "value": number}]}
        return 200, {"current_policy_version": 7, "queue_depth": number, "metrics": samples}

    fakes = [FakeWorker(answers={"GET /v1/metrics": values(number)}) for number in (3, 4)]

    async def test(front: Fronted) -> None:
        found = (await front.client.get("/v1/metrics")).json()
        assert (found["current_policy_version"], found["queue_depth"]) == (7, 7)
        assert [sample["labels"] for sample in found["metrics"]["a_total"]] == [
            {"worker": "0", "b": "x"},
            {"worker": "1", "b": "x"},
        ]

    with_front(test, *fakes)


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> ServerSettings:
    monkeypatch.setenv("FRONT_TEST_USER", "u" * 20)
    monkeypatch.setenv("FRONT_TEST_ADMIN", "a" * 20)
    keys = [{"name": name, "role": role, "env": f"FRONT_TEST_{name.upper()}"} for name, role in ROLES_OF.items()]
    return ServerSettings(port=0, drain_seconds=0, api_keys=keys)  # type: ignore[arg-type]


ROLES_OF = {"user": "inference", "admin": "admin"}
USER = {"authorization": f"Bearer {'u' * 20}"}


def test_keys_and_roles_are_checked_before_a_worker_is_asked(with_front: WithFront, keyed: ServerSettings) -> None:
    fake = FakeWorker(answers={CHANGE: OK})

    async def test(front: Fronted) -> None:
        for headers, status in (({}, 401), ({"authorization": "Bearer wrong"}, 401), (USER, 403)):
            response = await front.client.post("/v1/adapters/promote", json={}, headers=headers)
            assert response.status_code == status
        assert fake.requests == []
        assert (await front.client.get("/metrics")).status_code == 401
        assert (await front.client.get("/ready")).status_code == 200
        assert (await front.chat()).status_code == 401
        admin = {"x-api-key": "a" * 20}
        assert (await front.client.post("/v1/adapters/promote", json={}, headers=admin)).status_code == 200
        assert fake.requests[0][2]["x-api-key"] == "a" * 20, "the worker checks it again"

    with_front(test, fake, settings=keyed)


def test_what_a_worker_refuses_is_refused(with_front: WithFront) -> None:
    """The front has no keys, the worker has."""
    refusal = (401, {"error": {"message": "a key, please", "code": "invalid_api_key"}})
    rows = ["POST /v1/chat/completions", "GET /metrics", "GET /v1/queue", CHANGE, REWARD]

    async def test(front: Fronted) -> None:
        for method, path in (row.split() for row in rows):
            response = await front.client.request(method, path, json={} if method == "POST" else None)
            assert (response.status_code, response.json()) == refusal

    with_front(test, FakeWorker(answers=dict.fromkeys(rows, refusal)))


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"origin": "https://evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"content-length": "2", "transfer-encoding": "chunked"},
    ],
)
def test_what_a_foreign_page_sends_reaches_no_worker(with_front: WithFront, headers: Mapping[str, str]) -> None:
    fake = FakeWorker()

    async def test(front: Fronted) -> None:
        response = await front.client.post("/v1/chat/completions", content=b"{}", headers=headers)
        assert response.status_code in (400, 403)

    with_front(test, fake)
    assert fake.requests == []


def test_a_worker_sees_its_own_name_and_no_page(with_front: WithFront) -> None:
    fake = FakeWorker()

    async def test(front: Fronted) -> None:
        headers = {"origin": front.url, "sec-fetch-site": "same-origin", "connection": "close", "x-mine": "1"}
        response = await front.client.post("/v1/chat/completions", json={"messages": []}, headers=headers)
        assert response.status_code == 200
        seen = fake.requests[0][2]
        assert seen["host"] == f"127.0.0.1:{fake.port}"
        assert seen["x-mine"] == "1"
        assert not {"origin", "sec-fetch-site", "connection", "transfer-encoding"} & seen.keys()

    with_front(test, fake)


def test_pages_of_allowed_origins_may_read(with_front: WithFront) -> None:
    settings = ServerSettings(port=0, drain_seconds=0, cors_origins=("https://app.example",))
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}

    async def test(front: Fronted) -> None:
        preflight = await front.client.options("/v1/chat/completions", headers=headers)
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        response = await front.client.post("/v1/chat/completions", json={"messages": []}, headers=headers)
        assert response.headers["access-control-allow-origin"] == "https://app.example"

    with_front(test, FakeWorker(), settings=settings)


def test_a_body_is_bounded(with_front: WithFront) -> None:
    fake = FakeWorker(answers={CHANGE: OK})
    settings = ServerSettings(port=0, drain_seconds=0, max_body_bytes=2000, max_adapter_bytes=5000)

    async def test(front: Fronted) -> None:
        for content in (b"x" * 2001, chunks(2001)):
            response = await front.client.post("/v1/chat/completions", content=content)
            assert (response.status_code, "max_body_bytes" in response.text) == (413, True)
        assert (await front.client.post("/v1/adapters/promote", content=b'"%b"' % (b"x" * 4000))).status_code == 200
        assert (await front.client.post("/v1/adapters/promote", content=b"x" * 5001)).status_code == 413
        content = chunks_of(b'{"messages": [{"role": "user", "content": "in pieces"}]}')
        assert (await front.client.post("/v1/chat/completions", content=content)).status_code == 200

    with_front(test, fake, settings=settings)
    assert len(fake.requests) == 2


async def chunks(number: int) -> Any:
    for _ in range(number // 100 + 1):
        yield b"x" * 100


async def chunks_of(text: bytes) -> Any:
    for start in range(0, len(text), 10):
        yield text[start : start + 10]


def test_an_unknown_path_is_answered_as_a_server_does(with_front: WithFront) -> None:
    async def test(front: Fronted) -> None:
        response: httpx.Response = await front.client.get("/v2/models?a=1")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")

    fake = FakeWorker()
    with_front(test, fake)
    assert paths(fake) == ["GET /v2/models?a=1"]
