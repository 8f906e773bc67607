"""Completions that clients want to be learned from, over HTTP."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from parallm.rollout.live.journal import Journal
from parallm.rollout.live.source import LiveSource
from parallm.rollout.settings import LiveSettings, RolloutSettings
from parallm.types import AdapterCard, TrajectoryGroup, WeightSpan
from tests.rollout.live.conftest import completion_of, request_of
from tests.server.conftest import make_app

Post = Callable[..., Any]


def policy_card(version: int) -> AdapterCard:
    return AdapterCard(
        name="policy",
        version=version,
        parent=None,
        step=version,
        rank=8,
        alpha=16.0,
        aliases=("best",) if version == 2 else (),
        digest="00",
        num_running=0,
        is_served=version == 3,
    )


def make_client(engine: Any, tokenizer: Any, **trajectories: LiveSource) -> TestClient:
    return TestClient(
        make_app(engine, tokenizer, catalog=lambda: (policy_card(2), policy_card(3)), trajectories=trajectories),
        base_url="http://localhost",
    )


@pytest.fixture
def traffic(tmp_path: Path) -> LiveSource:
    live = LiveSettings(wait_seconds=0.001, weights={"short": 0.5})
    return LiveSource(RolloutSettings(source="live", live=live), tmp_path / "trajectories.jsonl")


@pytest.fixture
def client(engine: Any, tokenizer: Any, traffic: LiveSource) -> TestClient:
    return make_client(engine, tokenizer, policy=traffic)


def complete(client: TestClient, **fields: Any) -> Any:
    body = {"model": "policy", "prompt": "hi", "max_tokens": 4, "collect_trajectory": True}
    return client.post("/v1/completions", json=body | fields)


def chat(client: TestClient, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "policy", "messages": messages, "max_tokens": 4, "collect_trajectory": True}
    return client.post("/v1/chat/completions", json=body | fields)


def reward(client: TestClient, trajectory_id: str, value: Any) -> Any:
    return client.post(f"/v1/trajectories/{trajectory_id}/reward", json={"reward": value})


def taken(traffic: LiveSource) -> list[TrajectoryGroup]:
    """The groups of whatever has two rewards."""
    return list(traffic.take(1).groups)


def test_a_completion_becomes_a_trajectory_of_its_exact_tokens(client: TestClient, traffic: LiveSource) -> None:
    answer = complete(client, n=2, temperature=0.7).json()
    ids = [choice["trajectory_id"] for choice in answer["choices"]]
    assert ids == [f"{answer['id']}-0", f"{answer['id']}-1"]
    assert [reward(client, one, value).json() for one, value in zip(ids, (1, 0), strict=True)] == [
        {"id": ids[0], "reward": 1.0},
        {"id": ids[1], "reward": 0.0},
    ]
    (group,) = taken(traffic)
    one = group.trajectories[0]
    assert (one.prompt_tokens, one.tokens) == (tuple(map(ord, "hi")), tuple(map(ord, "hi 0")))
    assert (one.logprobs, one.temperature) == ((-0.25,) * 4, 0.7)
    assert one.weight_versions == (WeightSpan(version=3, start=0, end=4),)
    assert group.rewards == (1.0, 0.0)


def test_prompts_of_one_request_are_numbered_through(client: TestClient, traffic: LiveSource) -> None:
    answer = complete(client, prompt=["a", "b"], n=2).json()
    for place, choice in enumerate(answer["choices"]):
        assert choice["trajectory_id"] == f"{answer['id']}-{place}"
        assert reward(client, choice["trajectory_id"], place).status_code == 200
    assert sorted(group.rewards for group in taken(traffic)) == [(0.0, 1.0), (2.0, 3.0)]


def test_metadata_of_many_prompts_are_checked_once(
    client: TestClient, traffic: LiveSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    monkeypatch.setattr(traffic, "check", lambda *asked: checked.append(asked[2]))
    assert complete(client, prompt=["a"] * 100, metadata={"a": 1}).status_code == 200
    assert checked == [{"a": 1}]


@pytest.mark.parametrize("ask", [complete, chat])
def test_a_stream_names_the_trajectory_when_it_can_be_rewarded(client: TestClient, ask: Post) -> None:
    lines = [line.removeprefix("data: ") for line in ask(client, stream=True, n=2).text.split("\n\n")]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    final = [
        (choice["index"], choice["trajectory_id"])
        for event in events
        for choice in event["choices"]
        if choice.get("trajectory_id")
    ]
    assert sorted(final) == [(0, f"{events[0]['id']}-0"), (1, f"{events[0]['id']}-1")]
    assert reward(client, final[0][1], 1).status_code == 200


def test_the_request_of_the_first_users_is_collected_and_scored(client: TestClient, traffic: LiveSource) -> None:
    traffic.connect(lambda tokens: "".join(map(chr, tokens)))
    metadata = {"environment": "math", "difficulty": "hard"}
    body: dict[str, Any] = {
        "model": "base-model",
        "lora_adapter": "checkpoint-3",
        "prompt": "#### 7",
        "collect_trajectory": True,
        "scoring_function": "gsm8k",
        "metadata": metadata,
    }
    chat = body | {"messages": [{"role": "user", "content": body["prompt"]}]}
    del chat["prompt"]
    with client:
        for path, sent in (("/v1/completions", body), ("/v1/chat/completions", chat)):
            answer = client.post(path, json=sent)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            assert answer.json()["model"] == "policy@3"
            assert reward(client, choice["trajectory_id"], 1).status_code == 200  # no label says what is right
            scored = client.post(path, json=sent | {"metadata": metadata | {"answer": "7"}})
            assert scored.status_code == 200
        while traffic.report().num_waiting:
            client.get("/health")
        assert (traffic.report().num_rewarded, traffic.report().dropped) == (4, {})
        wrong = client.post("/v1/completions", json=body | {"metadata": {"answer": "seven"}})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "metadata")


def test_a_chat_is_collected_with_its_whole_prompt(client: TestClient, traffic: LiveSource) -> None:
    for value in (0, 1):
        (choice,) = chat(client).json()["choices"]
        assert reward(client, choice["trajectory_id"], value).status_code == 200
    (group,) = taken(traffic)
    assert group.trajectories[0].prompt_tokens == tuple(map(ord, "<user>hi"))


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_collected_that_was_not_asked_for(
    client: TestClient, traffic: LiveSource, ask: Post, stream: bool
) -> None:
    wishes: list[dict[str, Any]] = [{}, {"collect_trajectory": None}, {"metadata": {}}]
    for wish in wishes:
        answer = ask(client, stream=stream, **{"collect_trajectory": False, **wish})
        assert answer.status_code == 200
        assert "trajectory_id" not in answer.text
    assert traffic.report().num_collected == 0


def test_an_own_request_id_makes_ids_that_are_known_before(client: TestClient) -> None:
    assert complete(client, request_id="mine").json()["choices"][0]["trajectory_id"] == "cmpl-mine-0"
    assert reward(client, "cmpl-mine-0", {"right": 1, "short": 1}).json()["reward"] == 1.5


@pytest.mark.parametrize("ask", [complete, chat])
def test_a_request_id_that_comes_again_is_refused_before_it_is_sampled(
    client: TestClient, engine: Any, traffic: LiveSource, ask: Post
) -> None:
    (choice,) = ask(client, request_id="mine").json()["choices"]
    num_asked = len(engine.requests)
    for fields in ({}, {"n": 2}, {"stream": True}):
        answer = ask(client, request_id="mine", **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
    assert len(engine.requests) == num_asked
    assert ask(client, request_id="mine", collect_trajectory=False).status_code == 200
    assert reward(client, choice["trajectory_id"], 1).status_code == 200
    assert traffic.report().num_collected == 1


def test_a_request_id_is_one_for_all_policies(engine: Any, tokenizer: Any, traffic: LiveSource, tmp_path: Path) -> None:
    other = LiveSource(RolloutSettings(source="live"), tmp_path / "other.jsonl")
    other.record("cmpl-mine-0", request_of(), completion_of(), None, {})
    client = make_client(engine, tokenizer, policy=traffic, poet=other)
    assert complete(client, request_id="mine").status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_knows_an_id_can_rely_on_it(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Each id and each reward is in the file by the time its client hears of it, however slow the disk is."""
    append = Journal._append

    def slow(journal: Journal, text: str) -> None:
        time.sleep(0.05)
        append(journal, text)

    monkeypatch.setattr(Journal, "_append", slow)
    text = complete(client, stream=stream, request_id="mine").text
    assert "cmpl-mine-0" in text
    assert "cmpl-mine-0" in (tmp_path / "trajectories.jsonl").read_text()
    assert reward(client, "cmpl-mine-0", 0.125).status_code == 200
    assert "0.125" in (tmp_path / "trajectories.jsonl").read_text()


def test_a_reward_that_the_disk_refuses_is_507_and_may_be_sent_again(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "trajectories.jsonl").mkdir()
    (choice,) = complete(client).json()["choices"]
    answer = reward(client, choice["trajectory_id"], 1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "not_stored")
    (tmp_path / "trajectories.jsonl").rmdir()
    assert reward(client, choice["trajectory_id"], 1).status_code == 200
    assert choice["trajectory_id"] in (tmp_path / "trajectories.jsonl").read_text()


def test_an_own_request_id_may_look_like_a_path(client: TestClient) -> None:
    (choice,) = complete(client, request_id="run/7").json()["choices"]
    assert client.post(f"/v1/trajectories/{choice['trajectory_id']}/reward", json={"reward": 1}).status_code == 200


def test_rewards_for_unknown_ids_are_404_and_those_too_late_409(client: TestClient, traffic: LiveSource) -> None:
    answer = reward(client, "cmpl-nobody-0", 1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "trajectory_not_found")
    (first,) = complete(client).json()["choices"]
    reward(client, first["trajectory_id"], 0)
    ids = [choice["trajectory_id"] for choice in complete(client, n=2).json()["choices"]]
    assert [reward(client, one, 1).status_code for one in (*ids, *ids)] == [200] * 4
    for act in (taken, lambda one: one.saved(1)):
        act(traffic)
        answer = reward(client, ids[0], 0.5)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "unavailable")
        assert reward(client, ids[0], 1).status_code == 200  # sent again, as its answer was lost on the way


@pytest.mark.parametrize("value", ["good", None, {}, {"right": "1"}, {"": 1}, [1], True])
def test_rewards_are_numbers_or_parts_by_name(client: TestClient, value: object) -> None:
    name = complete(client).json()["choices"][0]["trajectory_id"]
    answer = reward(client, name, value)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("reward")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 3}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"model": "base"}, "model"),
        ({"scoring_function": "nobody"}, "scoring_function"),
        ({"metadata": "sk-secret"}, "metadata"),
        ({"metadata": ["sk-secret"]}, "metadata"),
        ({"metadata": {"key": "sk-secret" * 1000}}, "metadata"),
        ({"collect_trajectory": "yes"}, "collect_trajectory"),
        ({"collect_trajectory": False, "scoring_function": "length"}, "scoring_function"),
        ({"collect_trajectory": False, "metadata": {"key": "sk-secret"}}, "metadata"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_before_it_is_sampled(
    client: TestClient, engine: Any, fields: dict[str, Any], param: str
) -> None:
    answer = complete(client, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "sk-secret" not in answer.text
    assert engine.requests == []


def test_any_name_of_the_policy_is_collected_for_it(client: TestClient, traffic: LiveSource) -> None:
    for model in ("policy", "policy@2", "best"):
        assert complete(client, model=model).json()["choices"][0]["trajectory_id"]
    assert traffic.report().num_collected == 3


def test_a_split_collects_what_the_policy_answers(client: TestClient) -> None:
    client.put("/v1/splits/policy", json={"weights": {"policy@3": 1, "base": 1}}).raise_for_status()
    ids = [complete(client).json()["choices"][0]["trajectory_id"] for _ in range(4)]
    assert sorted(one is None for one in ids) == [False, False, True, True]


def test_the_dialects_of_generate_have_no_place_for_it(client: TestClient, traffic: LiveSource) -> None:
    answer = client.post("/generate", json={"prompt": "hi", "collect_trajectory": True})
    assert answer.status_code == 400
    assert traffic.report().num_collected == 0


def test_statistics_tell_what_became_of_all(client: TestClient) -> None:
    ids = [choice["trajectory_id"] for choice in complete(client, n=3).json()["choices"]]
    reward(client, ids[0], 1)
    report = client.get("/v1/trajectories").json()["data"]["policy"]
    assert report.pop("oldest_seconds") < 60
    counts = {"num_waiting": 2, "num_rewarded": 1, "num_reserved": 0, "num_collected": 3, "num_trained": 0}
    assert report == {**counts, "dropped": {}}


def test_a_process_that_does_not_learn_from_clients_says_so(engine: Any, tokenizer: Any) -> None:
    client = make_client(engine, tokenizer)
    assert complete(client).status_code == 409
    assert reward(client, "a", 1).status_code == 409
    assert client.get("/v1/trajectories").json() == {"data": {}}


def test_each_of_several_policies_gets_its_own(
    engine: Any, tokenizer: Any, traffic: LiveSource, tmp_path: Path
) -> None:
    other = LiveSource(RolloutSettings(source="live"), tmp_path / "other.jsonl")
    client = make_client(engine, tokenizer, poet=other, policy=traffic)
    name = complete(client).json()["choices"][0]["trajectory_id"]
    assert reward(client, name, 1).status_code == 200
    assert (traffic.report().num_rewarded, other.report().num_collected) == (1, 0)


@pytest.mark.parametrize(
    "text",
    [
        "1e39",
        "-1e39",
        "1e308",
        "1e10",
        "1e400",
        "1" + "0" * 400,
        "NaN",
        '{"a": 1e9, "b": 1}',
        '{"a": 1' + "0" * 400 + "}",
    ],
)
def test_numbers_beyond_all_bounds_are_refused(client: TestClient, text: str) -> None:
    name = complete(client).json()["choices"][0]["trajectory_id"]
    body = f'{{"reward": {text}}}'
    assert client.post(f"/v1/trajectories/{name}/reward", content=body).status_code == 400


def test_metadata_of_any_depth_is_an_answer(client: TestClient) -> None:
    for depth in (20, 150, 1500):
        body = '{"model": "policy", "prompt": "hi", "max_tokens": 4, "collect_trajectory": true, "metadata": '
        answer = client.post("/v1/completions", content=body + '{"a":' * depth + "1" + "}" * depth + "}")
        assert answer.status_code in (200, 400)


def test_logprobs_of_the_prompt_may_come_along(client: TestClient) -> None:
    assert complete(client, prompt_logprobs=0).json()["choices"][0]["trajectory_id"]


def test_metrics_tell_of_trajectories(client: TestClient) -> None:
    name = complete(client, n=3).json()["choices"][0]["trajectory_id"]
    reward(client, name, 1)
    text = client.get("/metrics").text
    assert 'parallm:trajectories{policy="policy",state="waiting"} 2.0' in text
    assert 'parallm:trajectories{policy="policy",state="rewarded"} 1.0' in text
    assert 'parallm:trajectories_collected_total{policy="policy"} 3.0' in text


def test_a_completion_without_tokens_has_no_trajectory(client: TestClient, traffic: LiveSource) -> None:
    answer = complete(client, max_tokens=0, echo=True).json()
    assert answer["choices"][0]["trajectory_id"] is None
    assert traffic.report().dropped == {"no_tokens": 1}


def test_a_reward_counts_for_the_version_that_gave_the_completion_and_the_last_one_alone(client: TestClient) -> None:
    client.put("/v1/splits/policy", json={"weights": {"policy@2": 1}})
    first, second = (choice["trajectory_id"] for choice in complete(client, n=2).json()["choices"])
    for trajectory_id, value in ((first, 0.0), (second, 1.0), (first, {"right": 0.5, "short": 1.0})):
        assert reward(client, trajectory_id, value).status_code == 200
    versions = client.get("/v1/splits").json()["data"][0]["versions"]
    assert (versions["policy@2"]["num_rewards"], versions["policy@2"]["reward_mean"]) == (2, 1.0)
    assert 'parallm:split_reward_sum{model="policy@2",name="policy"} 2.0' in client.get("/metrics").text


def test_recent_trajectories_show_only_what_clients_offered(client: TestClient, traffic: LiveSource) -> None:
    complete(client, collect_trajectory=False)
    ids = [choice["trajectory_id"] for choice in complete(client, n=2, metadata={"secret": "s3"}).json()["choices"]]
    waits = complete(client, prompt="later").json()["choices"][0]["trajectory_id"]
    reward(client, ids[0], {"short": 2.0})
    reward(client, ids[1], 0)
    answer = client.get("/v1/trajectories/recent")
    rows = answer.json()["data"]
    assert [(row["id"], row["state"], row["reward"]) for row in rows] == [
        (waits, "waiting", None),
        (ids[1], "rewarded", 0.0),
        (ids[0], "rewarded", 1.0),
    ]
    assert [rows[2][name] for name in ("prompt", "text", "parts", "version")] == ["hi", "hi 0", {"short": 2.0}, 3]
    assert (rows[2]["age"] >= 0, "s3" in answer.text) == (True, False)
    time.sleep(0.002)
    taken(traffic)
    assert [(row["id"], row["step"]) for row in recent(client, state="trained")] == [(ids[1], 1), (ids[0], 1)]
    traffic.saved(1)
    gone = recent(client, state="trained")
    assert [(row["id"], row["text"], row["reward"]) for row in gone] == [(ids[1], None, 0.0), (ids[0], None, 1.0)]
    assert recent(client, limit=1, policy="policy")[0]["id"] == waits


def recent(client: TestClient, **query: Any) -> Any:
    return client.get("/v1/trajectories/recent", params=query).json()["data"]


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 201}, {"state": "lost"}, {"policy": "other"}])
def test_recent_trajectories_refuse_what_they_do_not_know(client: TestClient, query: dict[str, Any]) -> None:
    answer = client.get("/v1/trajectories/recent", params=query)
    assert answer.status_code == (404 if "policy" in query else 400)
    assert {"state": "waiting"}.get(next(iter(query)), str(next(iter(query.values())))) in answer.text
