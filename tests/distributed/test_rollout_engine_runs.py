"""Whole runs with servers as rollout engines, as processes, with the embedded model."""

from collections.abc import Callable, Iterator
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

    def make(name: str, **options: str) -> Server:
        made.append(server(tmp_path / name, **options))
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
    whole = train("whole", "trainer.steps=10").finish()
    run = train("run", "trainer.steps=10", urls=[first.url, second.url])
    run.wait_for_step(2)
    first.kill()
    run.wait_for_step(4)
    first.spawn()
    first.wait()
    second.kill()  # now the first alone can go on
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
