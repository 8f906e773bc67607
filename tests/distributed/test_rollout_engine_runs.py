"""Whole runs with servers as rollout engines, as processes, with the embedded model."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from bench.processes import Server

from tests.distributed.rollout_servers import Trainer, differing_steps, quiet_end, server

MakeServer = Callable[..., Server]
MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    made: list[Server] = []

    def make(name: str, keys: Sequence[str] = ()) -> Server:
        made.append(server(tmp_path / name, keys=keys))
        made[-1].spawn()
        return made[-1]

    yield make
    quiet_end(made)


@pytest.fixture
def train(tmp_path: Path) -> Iterator[MakeTrainer]:
    made: list[Trainer] = []

    def make(name: str, *keys: str, **options: object) -> Trainer:
        made.append(Trainer(tmp_path / name, *keys, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_servers_that_come_and_go_leave_the_run_as_it_is_without_them(
    make_server: MakeServer, train: MakeTrainer
) -> None:
    first, second = make_server("first"), make_server("second")
    whole = train("whole", "trainer.steps=6").finish()
    run = train("run", "trainer.steps=6", urls=[first.url, second.url])
    run.wait_for_step(2)
    first.kill()
    run.wait_for_step(4)
    second.kill()  # the run waits until the first, which can go on alone, is back
    first.spawn()
    rows = run.finish()
    assert differing_steps(rows, whole) == []
    assert [row["engines/present"] for row in rows if row["engines/present"] != 1]
    tokens = [row[f"engines/{first.url.removeprefix('http://')}/tokens"] for row in rows]
    assert tokens[-1] == rows[-1]["rollout/tokens"]
    assert f"{first.url} joins" in run.log()
    assert f"rollouts go on without {second.url}" in run.log()


@pytest.mark.slow
def test_what_the_trainer_serves_is_served_by_its_engines(make_server: MakeServer, train: MakeTrainer) -> None:
    one = make_server("one")
    rows = train("run", "trainer.steps=3", urls=["local", one.url]).finish()
    cards = httpx.get(f"{one.url}/v1/adapters", trust_env=False).json()["data"]
    assert [(card["id"], card["is_served"]) for card in cards][:1] == [("policy@3", True)]
    shares = [row[f"engines/{one.url.removeprefix('http://')}/tokens"] / row["rollout/tokens"] for row in rows]
    assert all(0 < share < 1 for share in shares)


@pytest.mark.slow
def test_a_frozen_server_is_given_up_and_taken_back(make_server: MakeServer, train: MakeTrainer) -> None:
    one = make_server("one")
    one.wait()
    run = train("run", "trainer.steps=100000", urls=["local", one.url])
    run.wait_for_step(2)
    one.process.send_signal(signal.SIGSTOP)
    run.wait_for_step(run.num_steps + 3)
    assert f"rollouts go on without {one.url}" in run.log()
    one.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 30
    while run.log().count(f"{one.url} joins") < 2:
        assert time.monotonic() < deadline, run.log()
        time.sleep(0.1)
    run.process.send_signal(signal.SIGINT)
    run.finish()


@pytest.mark.slow
def test_a_killed_trainer_goes_on_with_the_same_servers_at_once(make_server: MakeServer, train: MakeTrainer) -> None:
    """The server holds versions that the trainer has lost and makes again."""
    one = make_server("one")
    keys = ("checkpoint.every=4", "trainer.steps=10")
    whole = train("whole", *keys).finish()
    one.wait()
    run = train("run", *keys, urls=[one.url])
    run.wait_for_step(7)
    run.stop()
    began = time.monotonic()
    run.start("checkpoint.resume=auto")
    rows = run.finish()
    assert time.monotonic() - began < 60
    assert differing_steps(rows, whole) == []


@pytest.mark.slow
def test_episodes_of_several_turns_are_sampled_elsewhere(make_server: MakeServer, train: MakeTrainer) -> None:
    one, other = make_server("one"), make_server("other")
    turns = ("environment=calculator", "rollout.max_turns=3", "trainer.steps=2")
    whole = train("whole", *turns).finish()
    one.wait()
    other.wait()
    run = train("run", *turns, urls=[one.url, other.url])
    assert differing_steps(run.finish(), whole) == []


@pytest.mark.slow
def test_two_policies_are_sampled_by_the_same_server(make_server: MakeServer, train: MakeTrainer) -> None:
    one = make_server("one")
    one.wait()
    keys = ("policies.first.learner.learning_rate=1e-3", "policies.second.learner.learning_rate=2e-3")
    run = train("run", *keys, "trainer.steps=2", urls=[one.url])
    run.finish()
    cards = httpx.get(f"{one.url}/v1/adapters", trust_env=False).json()["data"]
    assert {card["id"] for card in cards if card["is_served"]} == {"first@2", "second@2"}


@pytest.mark.slow
def test_a_key_is_asked_for_by_name(
    make_server: MakeServer, train: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARALLM_API_KEY", "0123456789abcdef")
    one = make_server("one", keys=("server.api_keys=[{name: trainer, role: training, env: PARALLM_API_KEY}]",))
    one.wait()
    train("right", "trainer.steps=1", urls=[one.url]).finish()
    monkeypatch.setenv("PARALLM_API_KEY", "fedcba9876543210")
    wrong = train("wrong", "trainer.steps=1", urls=[one.url])
    assert wrong.process.wait(60) == 78
    assert f"{one.url}: the API key is not one of this server's; set PARALLM_API_KEY to its key" in wrong.output


@pytest.mark.slow
def test_versions_change_in_flight_at_servers_too(make_server: MakeServer, train: MakeTrainer) -> None:
    one, other = make_server("one"), make_server("other")
    one.wait()
    other.wait()
    ahead = ("trainer.max_off_policy_steps=1", "rollout.switch_in_flight=true", "trainer.steps=8")
    run = train("run", *ahead, urls=[one.url, other.url])
    rows = run.finish()
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert {row["offpolicy/lag_max"] for row in rows} <= {0, 1}
    assert all(
        row[f"engines/{url.removeprefix('http://')}/lost_requests"] == 0 for row in rows for url in (one.url, other.url)
    )
