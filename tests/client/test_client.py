"""Both clients: what their methods send, and what they make of answers."""

import asyncio
import inspect
import json
import pickle
import ssl
import subprocess
import sys
from typing import Any

import httpx
import pytest

from parallm.client import ApiError, AsyncClient, Client, Generated
from parallm.client.calls import Call
from parallm.reports import SplitReport, TrainingStatus, TrajectoryReport, VersionReport
from parallm.types import AdapterCard, GivenUpdate, WeightSpan

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
    "num_bytes": 64,
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
    num_bytes=64,
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

ANSWER = {
    "request_id": "gen-1",
    "policy_version": 3,
    "step_id": 7,
    "prompt_ids": [5, 6],
    "completion_ids": [8, 1],
    "text": "5",
    "logprobs": [-0.5, -0.25],
    "finish_reason": "stop",
    "weight_versions": [{"version": "2", "start": 0, "end": 2}],
    "model": "policy@2",
    "metadata": {"batch_size": 3, "latency_ms": 1.5, "current_policy_version": 2, "new_in_2030": 1},
}
GENERATED = Generated(
    request_id="gen-1",
    policy_version=3,
    step_id=7,
    prompt_ids=(5, 6),
    completion_ids=(8, 1),
    text="5",
    logprobs=(-0.5, -0.25),
    finish_reason="stop",
    weight_versions=(WeightSpan(version=2, start=0, end=2),),
    model="policy@2",
    current_policy_version=2,
    batch_size=3,
    latency_ms=1.5,
    temperature=1.0,
)
UPDATE: dict[str, Any] = {
    "version": 3,
    "is_served": True,
    "has_moved": True,
    "num_trajectories": 2,
    "num_trained": 2,
    "num_recomputed": 0,
    "num_tokens": 4,
    "loss": -0.5,
    "gradient_norm": 0.25,
    "kl_to_behaviour": 0.0,
    "skipped": None,
    "checkpoint": None,
}
# name, arguments, what goes out (method, path and query, body), what comes back, what that means
CASES: list[tuple[str, tuple[Any, ...], tuple[str, str, bytes], Any, Any]] = [
    ("adapters", (), ("GET", "/v1/adapters", b""), {"data": [CARD]}, (POET,)),
    (
        "load_adapter",
        ("runs/a",),
        ("POST", "/v1/adapters/load", b'{"name":"policy","path":"runs/a"}'),
        CARD,
        POET,
    ),
    (
        "generate",
        ("2 + 3 =",),
        ("POST", "/generate", b'{"prompt":"2 + 3 =","policy_version":null}'),
        ANSWER,
        GENERATED,
    ),
    (
        "generate_all",
        (["2 + 3 =", "hi"],),
        ("POST", "/generate", b'{"prompt":["2 + 3 =","hi"],"policy_version":null}'),
        [ANSWER, ANSWER],
        [GENERATED, GENERATED],
    ),
    (
        "generate_all",
        ([(5, 6)],),
        ("POST", "/generate", b'{"prompt":[[5,6]],"policy_version":null}'),
        [ANSWER],
        [GENERATED],
    ),
    (
        "train_on",
        ([{"prompt": "a", "completion": "b", "reward": 1}],),
        ("POST", "/v1/training/update", b'{"trajectories":[{"prompt":"a","completion":"b","reward":1}]}'),
        STATUS | {"update": UPDATE},
        GivenUpdate(**UPDATE),
    ),
    (
        "score",
        (["a", "b"],),
        ("POST", "/v1/rewards/score", b'{"input":["a","b"]}'),
        {"data": [{"index": 0, "score": 1.5}, {"index": 1, "score": -2}]},
        [1.5, -2.0],
    ),
    (
        "score_completions",
        ("a", ["b"]),
        ("POST", "/v1/rewards/score", b'{"prompt":"a","completions":["b"]}'),
        {"data": [{"index": 0, "score": 1.5}]},
        [1.5],
    ),
    (
        "score_completions",
        ([{"role": "user", "content": "a"}], ["b"]),
        ("POST", "/v1/rewards/score", b'{"messages":[{"role":"user","content":"a"}],"completions":["b"]}'),
        {"data": [{"index": 0, "score": 1.5}]},
        [1.5],
    ),
    (
        "act",
        ("agent", [[0.5]]),
        ("POST", "/v1/rl/act", b'{"model":"agent","observations":[[0.5]]}'),
        {"policy_version": 3},
        {"policy_version": 3},
    ),
    ("publish_policy", ("agent", b"w"), ("PUT", "/v1/rl/policies/agent", b"w"), {"id": "agent@4"}, "agent@4"),
    ("shares", (), ("GET", "/v1/shares", b""), {"serving_share": 0.7}, {"serving_share": 0.7}),
    ("set_shares", (), ("PUT", "/v1/shares", b"{}"), {"serving_share": 0.7}, {"serving_share": 0.7}),
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
    ("evaluate", (), ("POST", "/v1/training/evaluate", b"{}"), {"evaluations": {"a": {"step": 4}}}, {"a": {"step": 4}}),
    ("stop_training", ("poet",), ("POST", "/v1/training/stop", b'{"policy":"poet"}'), STATUS, PAUSED),
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
    assert {case[0] for case in CASES} == methods(Client).keys() - {"adapter_archive", "close", "send", "events"}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_archive_is_bytes_and_a_refusal_of_one_is_an_error(kind: str) -> None:
    content, request = ask(kind, httpx.Response(200, content=b"PK"), "adapter_archive", ("a/b@3",))
    assert (content, request.url.raw_path) == (b"PK", b"/v1/adapters/a%2Fb@3/archive")
    error = {"message": "no model 'a'", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    with pytest.raises(ApiError, match="no model 'a'"):
        ask(kind, httpx.Response(404, json={"error": error}), "adapter_archive", ("a",))


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


KEYWORDS: list[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = [
    ("load_adapter", ("runs/a",), {"name": "poet"}, {"name": "poet", "path": "runs/a"}),
    (
        "generate",
        ("a",),
        {"policy_version": 1, "step_id": 100, "max_tokens": 8, "temperature": 0.5},
        {"prompt": "a", "policy_version": 1, "step_id": 100, "max_tokens": 8, "temperature": 0.5},
    ),
    (
        "train_on",
        ([],),
        {"policy": "poet", "update_inference": False, "checkpoint_name": "one"},
        {"policy": "poet", "trajectories": [], "update_inference": False, "checkpoint_name": "one"},
    ),
    ("score", (["a"],), {"model": "reward"}, {"input": ["a"], "model": "reward"}),
    ("set_shares", (), {"serving_share": 0.5, "engine_share": 1}, {"serving_share": 0.5, "engine_share": 1}),
    ("set_shares", (), {"serving_latency_target": 1.2}, {"serving_latency_target": 1.2}),
]


@pytest.mark.parametrize(("name", "arguments", "keywords", "sent"), KEYWORDS)
def test_what_is_given_by_keyword_is_sent(
    name: str, arguments: tuple[Any, ...], keywords: dict[str, Any], sent: dict[str, Any]
) -> None:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(400, json={"error": {"message": "no"}})

    client = Client("http://here", http=httpx.Client(transport=httpx.MockTransport(handle)))
    with pytest.raises(ApiError):
        getattr(client, name)(*arguments, **keywords)
    assert json.loads(seen[0].content) == sent


def test_an_answer_with_a_reward_is_a_trajectory_to_train_on() -> None:
    assert GENERATED.rewarded(0.5, group=7) == {
        "prompt_ids": [5, 6],
        "completion_ids": [8, 1],
        "text": "5",
        "logprobs": [-0.5, -0.25],
        "weight_versions": [{"version": "2", "start": 0, "end": 2}],
        "temperature": 1.0,
        "finish_reason": "stop",
        "reward": 0.5,
        "group": 7,
    }
    with pytest.raises(ValueError, match="generate_all"):
        Client("http://here").generate("a", n=2)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_address_and_key_go_along_whoever_makes_the_http_client(kind: str) -> None:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"data": []})

    transport = httpx.MockTransport(handle)
    if kind == "sync":
        with Client("http://here:1/", api_key="k", http=httpx.Client(transport=transport)) as client:
            client.adapters()
    else:

        async def main() -> None:
            http = httpx.AsyncClient(transport=transport)
            async with AsyncClient("http://here:1", api_key="k", http=http) as client:
                await client.adapters()

        asyncio.run(main())
    assert (str(seen[0].url), seen[0].headers["authorization"]) == ("http://here:1/v1/adapters", "Bearer k")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_arguments_that_contradict_the_http_client_are_refused(kind: Any) -> None:
    http = httpx.Client if kind is Client else httpx.AsyncClient
    there, keyed = http(base_url="http://there"), http(headers={"Authorization": "Bearer other"})
    for arguments, options, message in (
        (("http://here",), {"http": there}, "base_url is http://here, and that of http is http://there"),
        (("http://here",), {"http": keyed, "api_key": "k"}, "api_key differs from the key"),
        (("http://here",), {"http": http(), "verify": False}, "verify belongs to the client that is given as http"),
        (("http://here",), {"http": http(), "timeout": 3}, "timeout belongs to the client"),
        (("",), {"http": http()}, "give base_url"),
        (("",), {}, "base_url is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(*arguments, **options)
    kind("http://there/", http=there)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("key", "message"), [("secret\n", r"api_key\.strip\(\)"), ("", "is empty"), (" \n", "is empty")]
)
def test_a_key_that_no_header_holds_is_refused_without_showing_it(kind: Any, key: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        kind("http://here", api_key=key)
    assert "secret" not in str(caught.value)


def test_a_client_of_its_own_is_made_with_the_time_and_the_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(httpx, "Client", lambda **options: made.append(options))
    context = ssl.create_default_context()
    Client("https://here", api_key="k", verify=context, timeout=3)
    Client("https://here")
    assert made == [{"timeout": 3, "verify": context}, {"timeout": 600.0, "verify": True}]


def test_the_client_loads_no_mlx() -> None:
    script = "import sys, parallm.client; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


STREAM = b'data: {"text": "a"}\n\ndata: {"text": "b"}\n\ndata: [DONE]\n\n'


def answering(status: int, content: bytes) -> httpx.MockTransport:
    return httpx.MockTransport(lambda request: httpx.Response(status, content=content))


def events_of(kind: str, transport: httpx.MockTransport) -> list[str]:
    """Return the texts of a stream's events, read by either client."""
    call = Call("POST", "/v1/completions", lambda event: str(event["text"]), {})
    if kind == "sync":
        with Client("http://localhost", http=httpx.Client(transport=transport)) as client:
            return list(client.events(call))

    async def read() -> list[str]:
        async with AsyncClient("http://localhost", http=httpx.AsyncClient(transport=transport)) as client:
            return [event async for event in client.events(call)]

    return asyncio.run(read())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_events_of_a_stream_come_one_by_one_and_an_error_ends_them(kind: str) -> None:
    assert events_of(kind, answering(200, STREAM)) == ["a", "b"]
    with pytest.raises(ApiError, match="no luck") as late:
        events_of(kind, answering(200, b'data: {"error": {"message": "no luck", "code": "draining"}}\n\n'))
    assert late.value.code == "draining"
    with pytest.raises(ApiError, match="no such model") as early:
        events_of(kind, answering(404, b'{"error": {"message": "no such model"}}'))
    assert early.value.status == 404
