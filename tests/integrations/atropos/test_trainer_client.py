"""The trainer's side of the API against its life cycle and its traps."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from parallm.errors import ConfigError
from parallm.integrations.atropos.trainer_client import Registration, TrainerClient, TrajectoryApi
from tests.integrations.atropos.conftest import REGISTRATION, atropos_settings, numbered
from tests.run_api import RunApi

Make = Callable[..., TrainerClient]


def first_tokens(batch: Any) -> list[int]:
    return [group["tokens"][0][0] for group in batch]


def ask(client: TrainerClient, times: int = 1) -> list[Any]:
    async def all_of_them() -> list[Any]:
        return [await client.next_batch() for _ in range(times)]

    return asyncio.run(all_of_them())


def test_the_first_batch_is_asked_for_right_behind_the_registration(make_client: Make, run_api: RunApi) -> None:
    client = make_client()
    assert asyncio.run(run_api.register_env()) == {"status": "wait for trainer to start"}
    assert ask(client) == [None]
    assert run_api.calls == ["/info", "/register", "/info", "/batch"]
    assert asyncio.run(run_api.register_env()) == {"status": "success"}
    assert client.facts.state == "waiting"


def test_batches_that_were_formed_together_come_oldest_first(make_client: Make, run_api: RunApi) -> None:
    client = make_client()
    ask(client)
    for number in range(6):
        run_api.post(numbered(number))
    found = ask(client, 4)
    assert [first_tokens(batch) for batch in found[:3]] == [[0, 1], [2, 3], [4, 5]]
    assert found[3] is None
    assert (client.facts.num_batches, client.facts.step) == (3, 3)


def test_what_is_not_formed_yet_is_left_to_the_api(make_client: Make, run_api: RunApi) -> None:
    client = make_client()
    ask(client)
    for number in range(2):
        run_api.post(numbered(number))
    assert first_tokens(ask(client)[0]) == [0, 1]
    run_api.post(numbered(2))
    run_api.post(numbered(3))
    assert len(run_api.state["queue"]) == 2
    assert first_tokens(ask(client)[0]) == [2, 3]


def test_a_restarted_api_is_registered_with_again(make_client: Make, run_api: RunApi) -> None:
    client = make_client()
    ask(client)
    run_api.restart()
    assert ask(client) == [None]
    assert (client.facts.num_lost, client.facts.state) == (1, "unregistered")
    assert ask(client) == [None]
    assert client.facts.state == "waiting"
    for number in range(2):
        run_api.post(numbered(number))
    assert first_tokens(ask(client)[0]) == [0, 1]


def test_a_step_that_runs_backwards_means_that_somebody_else_has_registered(make_client: Make, run_api: RunApi) -> None:
    client = make_client()
    ask(client)
    for number in range(2):
        run_api.post(numbered(number))
    ask(client)
    run_api.restart()

    async def somebody_else() -> None:
        api = TrajectoryApi(atropos_settings(), httpx.ASGITransport(run_api.app))
        await api.register(REGISTRATION)
        await api.batch()

    asyncio.run(somebody_else())
    ask(client)
    assert (client.facts.num_lost, client.facts.problem) == (1, "its step has gone back from 1 to 0")


def test_an_api_that_an_environment_has_posted_to_too_early_is_reset(make_client: Make, run_api: RunApi) -> None:
    run_api.post(numbered(0))
    run_api.on_reset = [numbered(1), numbered(2)]  # and again between two resets and the registrations after them
    client = make_client()
    assert ask(client) == [None]
    assert run_api.calls.count("/reset_data") == 3
    assert client.facts.state == "waiting"
    assert run_api.state["batch_size"] == 4


def test_an_api_that_is_posted_to_too_early_for_ever_is_asked_again_later(make_client: Make, run_api: RunApi) -> None:
    run_api.post(numbered(0))
    run_api.on_reset = [numbered(1)] * 20
    client = make_client()
    assert ask(client) == [None]
    assert client.facts.state == "poisoned"
    assert "stays without a trainer after 20 resets" in client.facts.problem
    ask(client)
    assert client.facts.registered_at is not None


def test_an_api_of_other_sizes_is_refused_without_consent(make_client: Make, run_api: RunApi) -> None:
    ask(make_client())
    with pytest.raises(ConfigError, match=r"batch_size=4 and max_token_len=64, this run has batch_size=8.*reset=true"):
        ask(make_client(batch_size=8))
    assert "/reset_data" not in run_api.calls


def test_an_api_of_other_sizes_is_emptied_with_consent(make_client: Make, run_api: RunApi) -> None:
    ask(make_client())
    run_api.post(numbered(0))
    ask(make_client(batch_size=8, may_reset=True))
    assert (run_api.state["batch_size"], run_api.state["queue"]) == (8, [])


def test_a_trainer_that_comes_back_gets_what_the_api_holds(make_client: Make, run_api: RunApi) -> None:
    ask(make_client())
    for number in range(4):
        run_api.post(numbered(number))
    run_api.state["step"] = 7
    asyncio.run(run_api.batch())  # a batch that the killed trainer has fetched and lost; one is left after it
    client = make_client()
    assert first_tokens(ask(client)[0]) == [0, 1]
    assert ask(client) == [None]


def test_a_batch_that_the_api_loses_is_counted_and_the_next_one_comes(make_client: Make, run_api: RunApi) -> None:
    client = make_client()
    ask(client)
    for number in range(2):
        run_api.post(numbered(number))
    run_api.next_failure = 500
    assert ask(client) == [None]
    assert (client.facts.num_failed_batches, client.facts.num_lost) == (1, 0)
    assert "a batch is lost" in client.facts.problem
    assert ask(client) == [None]
    assert (client.facts.state, client.facts.problem) == ("waiting", "")
    for number in range(2, 4):
        run_api.post(numbered(number))
    assert first_tokens(ask(client)[0]) == [2, 3]


def test_an_api_that_somebody_resets_is_registered_with_again(make_client: Make, run_api: RunApi) -> None:
    client = make_client()
    ask(client)
    asyncio.run(run_api.reset_data())
    ask(client, 2)
    assert client.facts.num_lost == 1
    assert run_api.state["batch_size"] == 4


def test_an_api_that_somebody_has_left_without_sizes_is_noticed_within_seconds(
    make_client: Make, run_api: RunApi
) -> None:
    now = [100.0]
    client = make_client(clock=lambda: now[0])
    ask(client)
    run_api.on_reset = [numbered(0)]  # after this a registration changes nothing, and there is never a batch
    asyncio.run(run_api.reset_data())
    ask(client)
    assert client.facts.num_lost == 0
    now[0] += 5
    ask(client, 2)
    assert (client.facts.num_lost, run_api.state["batch_size"]) == (1, 4)


def test_an_api_that_does_not_answer_is_waited_for() -> None:
    answers: list[Any] = [httpx.ConnectError("refused"), httpx.ReadError("reset by peer")]

    def answer(request: httpx.Request) -> httpx.Response:
        if answers:
            raise answers.pop(0)
        return httpx.Response(503)

    api = TrajectoryApi(atropos_settings(), httpx.MockTransport(answer))
    client = TrainerClient(api, registration, may_reset=False)
    assert ask(client, 2) == [None, None]
    assert (client.facts.state, client.facts.problem) == (
        "unreachable",
        "http://127.0.0.1:8001/info: reset by peer",
    )
    ask(client)
    assert client.facts.problem == "http://127.0.0.1:8001/info has answered 503"


@pytest.mark.parametrize("body", ["[]", "{}", "<html>", '{"batch_size": "4"}', "[" * 5000])
def test_something_else_than_an_api_is_no_crash(body: str) -> None:
    headers = {"content-type": "application/json"}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body, headers=headers))
    client = TrainerClient(TrajectoryApi(atropos_settings(), transport), registration, may_reset=False)
    assert ask(client) == [None]
    assert client.facts.problem


def registration() -> Registration:
    return REGISTRATION
