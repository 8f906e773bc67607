"""Both clients: what their methods send, and what they make of answers."""

import asyncio
import inspect
import pickle
import subprocess
import sys
from typing import Any

import httpx
import pytest

from parallm.client import ApiError, AsyncClient, Client
from parallm.reports import SplitReport, TrainingStatus, TrajectoryReport, VersionReport
from parallm.types import AdapterCard

CARD = {
    "id": "poet@2",
    "name": "poet",
    "version": 2,
    "parent": 1,
    "step": 5,
    "rank": 8,
    "alpha": 16.0,
    "rslora": False,
    "is_dora": False,
    "aliases": ["best"],
    "digest": "00",
    "num_running": 0,
    "is_served": True,
}
POET = AdapterCard(
    name="poet",
    version=2,
    parent=1,
    step=5,
    rank=8,
    alpha=16.0,
    aliases=("best",),
    digest="00",
    num_running=0,
    is_served=True,
)
STATUS = {"state": "paused", "step": 3, "total_steps": 9, "version": 2, "metrics": {"loss": None}, "policies": {}}
PAUSED = TrainingStatus(state="paused", step=3, total_steps=9, version=2, metrics={"loss": None})
TOLD = {
    "num_waiting": 1,
    "num_rewarded": 2,
    "oldest_seconds": 0.5,
    "num_collected": 9,
    "num_trained": 4,
    "dropped": {"full": 2},
    "new_in_2030": 1,
}
REPORT = TrajectoryReport(
    num_waiting=1, num_rewarded=2, oldest_seconds=0.5, num_collected=9, num_trained=4, dropped={"full": 2}
)

ANSWERED = {"num_requests": 2, "num_completions": 3, "num_tokens": 9, "num_rewards": 1, "reward_mean": 0.5}
SPLIT = {"name": "ab", "shares": {"base": 1.0}, "versions": {"base": ANSWERED}}
AB = SplitReport(
    name="ab",
    shares={"base": 1.0},
    versions={
        "base": VersionReport(num_requests=2, num_completions=3, num_tokens=9, num_rewards=1, reward_mean=0.5),
    },
)

# name, arguments, what goes out (method, path and query, body), what comes back, what that means
CASES: list[tuple[str, tuple[Any, ...], tuple[str, str, bytes], Any, Any]] = [
    ("adapters", (), ("GET", "/v1/adapters", b""), {"data": [CARD]}, (POET,)),
    (
        "load_adapter",
        ("poet", "runs/a"),
        ("POST", "/v1/adapters/load", b'{"name":"poet","path":"runs/a"}'),
        CARD,
        POET,
    ),
    ("upload_adapter", ("poet", b"zip"), ("PUT", "/v1/adapters/poet", b"zip"), CARD, POET),
    ("update_adapter", ("poet", b"w"), ("POST", "/update_adapter_weights?name=poet", b"w"), CARD, POET),
    ("unload_adapter", ("poet@2",), ("DELETE", "/v1/adapters/poet@2", b""), {"status": "ok"}, None),
    ("unload_adapter", ("a/../b",), ("DELETE", "/v1/adapters/a%2F..%2Fb", b""), {"status": "ok"}, None),
    ("promote", (3,), ("POST", "/v1/adapters/promote", b'{"name":"policy","version":3}'), {}, None),
    ("roll_back", ("poet",), ("POST", "/v1/adapters/rollback", b'{"name":"poet"}'), {"name": "poet", "version": 1}, 1),
    (
        "set_alias",
        ("good", 2, "poet"),
        ("POST", "/v1/adapters/aliases", b'{"alias":"good","name":"poet","version":2}'),
        {"status": "ok"},
        None,
    ),
    ("remove_alias", ("good", "poet"), ("DELETE", "/v1/adapters/poet/aliases/good", b""), {"status": "ok"}, None),
    ("training_status", (), ("GET", "/v1/training/status", b""), STATUS, PAUSED),
    ("pause_training", (), ("POST", "/v1/training/pause", b"{}"), STATUS, PAUSED),
    ("resume_training", ("poet",), ("POST", "/v1/training/resume", b'{"policy":"poet"}'), STATUS, PAUSED),
    ("train_step", (), ("POST", "/v1/training/update", b"{}"), STATUS, PAUSED),
    ("checkpoint", (), ("POST", "/v1/training/checkpoint", b"{}"), {"folders": {"policy": "a"}}, {"policy": "a"}),
    (
        "reward",
        ("cmpl-1-0", 1.5),
        ("POST", "/v1/trajectories/cmpl-1-0/reward", b'{"reward":1.5}'),
        {"reward": 1.5},
        1.5,
    ),
    (
        "reward",
        ("a/b", {"right": 1.0}),
        ("POST", "/v1/trajectories/a%2Fb/reward", b'{"reward":{"right":1.0}}'),
        {"reward": 1.0},
        1.0,
    ),
    ("splits", (), ("GET", "/v1/splits", b""), {"data": [SPLIT]}, {"ab": AB}),
    ("set_split", ("ab", {"base": 1}), ("PUT", "/v1/splits/ab", b'{"weights":{"base":1}}'), SPLIT, AB),
    ("remove_split", ("a/b",), ("DELETE", "/v1/splits/a%2Fb", b""), SPLIT, None),
    ("cancel", ("cmpl-1",), ("POST", "/v1/requests/cmpl-1/cancel", b""), {"status": "aborted", "aborted": 2}, 2),
    ("trajectories", (), ("GET", "/v1/trajectories", b""), {"data": {"policy": TOLD}}, {"policy": REPORT}),
]


def ask(kind: str, answer: httpx.Response, name: str, arguments: tuple[Any, ...]) -> tuple[Any, httpx.Request]:
    """What a method of either client returns, and what it has sent."""
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answer

    transport = httpx.MockTransport(handle)
    if kind == "sync":
        with Client("", http=httpx.Client(base_url="http://here", transport=transport)) as client:
            return getattr(client, name)(*arguments), seen[0]

    async def main() -> Any:
        async with AsyncClient("", http=httpx.AsyncClient(base_url="http://here", transport=transport)) as client:
            return await getattr(client, name)(*arguments)

    return asyncio.run(main()), seen[0]


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}{case[1]}"[:40])
def test_a_method_is_one_request_and_its_answer(kind: str, case: tuple[Any, ...]) -> None:
    name, arguments, (method, path, body), answer, meaning = case
    result, request = ask(kind, httpx.Response(200, json=answer), name, arguments)
    assert result == meaning
    assert (request.method, request.url.raw_path.decode(), request.content) == (method, path, body)


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(one).parameters) for name, one in found if not name.startswith("_")}

    assert methods(Client) == methods(AsyncClient)
    assert {case[0] for case in CASES} == methods(Client).keys() - {"close"}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_refusal_is_an_error_with_what_the_server_says(kind: str) -> None:
    error = {"message": "no trajectory 'x'", "type": "invalid_request_error", "param": "id", "code": "not_there"}
    with pytest.raises(ApiError, match="no trajectory 'x'") as raised:
        ask(kind, httpx.Response(404, json={"error": error}), "reward", ("x", 1.0))
    copied = pickle.loads(pickle.dumps(raised.value))
    assert (copied.status, copied.code, copied.param, str(copied)) == (404, "not_there", "id", "no trajectory 'x'")


def test_what_a_proxy_says_is_an_error_too() -> None:
    with pytest.raises(ApiError, match="Bad Gateway") as raised:
        ask("sync", httpx.Response(502, text="<h1>Bad Gateway</h1>"), "adapters", ())
    assert (raised.value.status, raised.value.code) == (502, None)


def test_the_key_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(httpx, "Client", lambda **options: made.append(options))
    Client("http://here", api_key="k")
    assert made[0]["headers"] == {"Authorization": "Bearer k"}


def test_the_client_loads_no_mlx() -> None:
    script = "import sys, parallm.client; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
