import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from parallm.errors import UnknownModel
from parallm.server.control.traffic_splits import TrafficSplits
from parallm.types import AdapterCard, GenerationRequest, SamplingParams
from tests.server.conftest import make_app, send_to

Call = Callable[..., httpx.Response]
REQUEST = GenerationRequest(request_id="r", prompt_tokens=(1,), sampling=SamplingParams(max_tokens=1), model="policy")


@pytest.fixture
def call(app: FastAPI) -> Call:
    """Of an application of its own, which has no splits and no rewards yet."""
    return partial(send_to, app)


def test_measured_shares_are_within_two_points_of_the_weights(app: Any) -> None:
    weights = {"policy@3": 0.7, "policy@2": 0.2, "base": 0.1}
    with TestClient(app, base_url="http://localhost") as client:
        assert client.put("/v1/splits/policy", json={"weights": weights}).json()["shares"] == pytest.approx(weights)
        for _ in range(2000):
            assert client.post("/v1/completions", json={"model": "policy", "prompt": "a"}).status_code == 200
        versions = client.get("/v1/splits").json()["data"][0]["versions"]
    assert sum(one["num_requests"] for one in versions.values()) == 2000
    for model, weight in weights.items():
        assert abs(versions[model]["num_requests"] / 2000 - weight) < 0.02


def test_a_user_stays_on_a_side_and_an_answer_names_the_version_that_gave_it(
    complete: Call, call: Call, chunks_of: Callable[[httpx.Response], list[Any]]
) -> None:
    call("PUT", "/v1/splits/ab", json={"weights": {"policy@3": 1, "policy@2": 1}})
    sides = {user: {complete(model="ab", user=user).json()["model"] for _ in range(5)} for user in "abcdefgh"}
    assert all(len(models) == 1 for models in sides.values())
    assert set.union(*sides.values()) == {"policy@2", "policy@3"}
    assert {chunk["model"] for chunk in chunks_of(complete(model="ab", user="a", stream=True))} == sides["a"]
    several = complete(model="ab", user="a", prompt=["x", "y"]).json()
    assert several["model"] == next(iter(sides["a"]))


def test_rewards_go_to_the_version_that_gave_the_answer(complete: Call, call: Call) -> None:
    call("PUT", "/v1/splits/policy", json={"weights": {"policy@2": 1}})
    answer = complete(n=2, max_tokens=3).json()
    complete(request_id="mine", max_tokens=3)
    for name, reward in ((answer["id"], 1.0), ("mine", 0.0)):
        assert call("POST", "/v1/rewards", json={"id": name, "reward": reward}).json() == {"status": "ok"}
    unknown = call("POST", "/v1/rewards", json={"id": "cmpl-other", "reward": 1.0})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "id")
    assert call("GET", "/v1/splits").json()["data"] == [
        {
            "name": "policy",
            "shares": {"policy@2": 1.0},
            "versions": {
                "policy@2": {
                    "num_requests": 2, "num_completions": 3, "num_tokens": 9, "num_rewards": 2, "reward_mean": 0.5,
                }
            },
        }
    ]  # fmt: skip


def test_no_reward_makes_the_mean_of_a_version_infinite(complete: Call, call: Call) -> None:
    answer = complete(max_tokens=3).json()
    for reward, status in ((1e308, 400), (-1e308, 400), (1e10, 400), (1.0, 200)):
        assert call("POST", "/v1/rewards", json={"id": answer["id"], "reward": reward}).status_code == status
    (split,) = call("GET", "/v1/splits").json()["data"]
    assert [one["reward_mean"] for one in split["versions"].values()] == [1.0]


def test_a_name_without_its_split_means_again_what_it_meant(complete: Call, call: Call) -> None:
    call("PUT", "/v1/splits/policy", json={"weights": {"policy@2": 1}})
    assert complete().json()["model"] == "policy@2"
    assert call("DELETE", "/v1/splits/policy").json()["shares"] == {}
    assert complete().json()["model"] == "policy@3"
    assert call("DELETE", "/v1/splits/policy").status_code == 404


@pytest.mark.parametrize(
    ("name", "weights", "status"),
    [
        ("ab", {}, 400),
        ("ab", {"policy@3": -1}, 400),
        ("ab", {"policy@3": 0}, 400),
        ("ab", {"policy@9": 1}, 404),
        ("policy@3", {"policy@2": 1}, 400),
        ("base", {"policy@2": 1}, 400),
    ],
)
def test_splits_that_cannot_be_are_refused(call: Call, name: str, weights: dict[str, float], status: int) -> None:
    assert call("PUT", f"/v1/splits/{name}", json={"weights": weights}).status_code == status


def test_the_rest_of_a_split_answers_when_a_version_is_gone(app: Any) -> None:
    cards: list[AdapterCard] = [card(2), card(3)]
    splits = TrafficSplits(lambda: tuple(cards), ("policy",))
    asyncio.run(splits.put("policy", {"policy@2": 1, "policy@3": 1}))
    asked = [[replace(REQUEST, request_id=str(number))] for number in range(50)]
    assert {splits.routed(one)[0].model for one in asked} == {"policy@2", "policy@3"}
    del cards[0]
    assert {splits.routed(one)[0].model for one in asked} == {"policy@3"}
    del cards[0]
    assert {splits.routed(one)[0].model for one in asked} == {"policy"}
    with pytest.raises(UnknownModel, match="no split 'poet'"):
        asyncio.run(splits.remove("poet"))


def test_splits_begin_with_those_that_are_given_and_change_one_after_the_other(app: Any) -> None:
    kept: list[dict[str, Any]] = []

    async def keep(splits: Mapping[str, Mapping[str, float]]) -> None:
        await asyncio.sleep(0)
        kept.append(dict(splits))

    async def main() -> None:
        splits = TrafficSplits(lambda: (card(2), card(3)), ("policy",), keep, {"old": {"policy@2": 1.0}})
        assert splits.routed([replace(REQUEST, model="old")])[0].model == "policy@2"
        await asyncio.gather(splits.put("a", {"policy@2": 1}), splits.put("b", {"policy@3": 1}), splits.remove("old"))
        assert list(splits.all()) == ["a", "b"]

    asyncio.run(main())
    assert kept[-1] == {"a": {"policy@2": 1.0}, "b": {"policy@3": 1.0}}


def card(version: int) -> AdapterCard:
    return AdapterCard(
        name="policy", version=version, parent=None, step=0, rank=2, alpha=4, aliases=(), digest="", num_running=0,
        is_served=False,
    )  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/generate", {"text": "a", "sampling_params": {}}),
    ],
)
def test_another_version_answers_where_one_is_unloaded_between_its_choice_and_the_engine(
    engine: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], stream: bool
) -> None:
    cards = [card(2), card(3)]
    check = engine._check

    def unload(request: GenerationRequest) -> None:
        if request.model == "policy@2":
            cards[:] = cards[1:]
            raise UnknownModel("policy@2 was unloaded")
        check(request)

    monkeypatch.setattr(engine, "_check", unload)
    app = make_app(engine, tokenizer, catalog=lambda: tuple(cards))
    with TestClient(app, base_url="http://localhost") as client:
        client.put("/v1/splits/policy", json={"weights": {"policy@2": 1, "policy@3": 1e-9}})
        answer = client.post(path, json={"model": "policy", "stream": stream, **body})
        assert (answer.status_code, [one.model for one in engine.requests]) == (200, ["policy@3"]), answer.text
        assert client.post("/v1/completions", json={"model": "policy@2", "prompt": "a"}).status_code == 404
