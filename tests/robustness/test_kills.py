"""Nothing that a person gave is lost when the process is killed: kill -9 at random points, and the account after it.

Live traffic: clients ask for completions, rate them, and send again what a kill has left unanswered. No rating that was
answered may be lost, none may be trained on twice, and what is sent again must be answered right. Two controls change
the run's file before each start, as if reserved trajectories were trained on, and as if nothing were reserved: the
account must find what is lost, and what is trained on twice.

Serving: an operator loads adapters, sets aliases, splits and what names mean. After each kill all of it must be as it
was before or after the change under way; a control that forgets one change must be found.
"""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.measurement import request_of_tests
from bench.processes import Server

from tests.robustness.operator_acts import serve_and_kill
from tests.robustness.rating_clients import Outcome, RatingClients

LIVE = (
    *("+recipe=live_traffic", "rollout.problems_per_step=2", "rollout.group_size=4", "rollout.max_tokens=16"),
    *("rollout.live.wait_seconds=1", "rollout.live.max_trajectories=100000", "trainer.steps=1000000"),
    *("trainer.max_off_policy_steps=1000000", "trainer.guard.on_divergence=warn", "learner.learning_rate=1e-5"),
    *("metrics.samples_per_step=1000000", "checkpoint.every=3"),
)
"""Steps by the second, of which two in three are in no checkpoint yet; no rating becomes too old."""
MAX_SECONDS = 2.0
"""From the first answer of a process to its end."""
EARLY, START = 0.2, 3.0
"""Share of the kills before the first answer, and the seconds in which they come."""
Change = Callable[[dict[str, object]], dict[str, object]]
Record = Callable[[str, object], None]


@pytest.mark.robustness
def test_no_rating_is_lost_or_trained_on_twice(tmp_path: Path, record_property: Record) -> None:
    kills = request_of_tests().size(50, 3)
    outcome = asyncio.run(rate_and_kill(tmp_path, kills, 0, lambda line: line))
    record_property("live.kills", kills)
    record_property("live.ratings", outcome.num_ratings)
    record_property("live.ratings_lost", len(outcome.lost))
    record_property("live.trained_twice", len(outcome.twice))
    record_property("live.resent", outcome.num_resent)
    record_property("live.wrong_answers", len(outcome.wrong))
    assert (outcome.lost, outcome.twice, outcome.wrong) == ((), (), ())
    assert outcome.num_ratings > 0


@pytest.mark.robustness
def test_the_account_finds_what_is_lost_and_what_is_trained_on_twice(tmp_path: Path, record_property: Record) -> None:
    kills = request_of_tests().size(5, 3)
    for name, change in (("lossy", as_trained), ("forgetful", as_waiting)):
        (tmp_path / name).mkdir()
        outcome = asyncio.run(rate_and_kill(tmp_path / name, kills, len(name), change))
        if name == "lossy":
            record_property("live.control_lost", len(outcome.lost))
            assert outcome.lost
        else:
            record_property("live.control_twice", len(outcome.twice))
            assert outcome.twice


@pytest.mark.robustness
def test_what_operators_set_is_there_after_each_end_of_the_server(tmp_path: Path, record_property: Record) -> None:
    operated = asyncio.run(serve_and_kill(tmp_path, request_of_tests().size(20, 2), 0))
    record_property("serve.kills", operated.num_kills)
    record_property("serve.changes", operated.num_changes)
    record_property("serve.wrong_states", len(operated.wrong))
    assert operated.wrong == []


@pytest.mark.robustness
def test_a_change_that_is_forgotten_is_found(tmp_path: Path, record_property: Record) -> None:
    operated = asyncio.run(serve_and_kill(tmp_path, 1, 0, forgets=True))
    record_property("serve.control_wrong_states", len(operated.wrong))
    assert operated.wrong


async def rate_and_kill(folder: Path, kills: int, seed: int, change: Change) -> Outcome:
    """Kill a run `kills` times while clients rate; `change` is done to the lines of its file before each start."""
    source = random.Random(seed)
    server = Server("parallm.train", LIVE, folder)
    clients = RatingClients(server.url, seed)
    server.spawn()
    await asyncio.to_thread(server.wait)
    asking = asyncio.create_task(clients.run())
    for number in range(kills):
        if number and source.random() < EARLY:
            await asyncio.sleep(source.uniform(0, START))  # it was spawned and may not answer yet
        else:
            await asyncio.to_thread(server.wait)
            await asyncio.sleep(source.uniform(0, MAX_SECONDS))
        server.kill()
        runs = (folder / "checkpoints" / "live_traffic").iterdir()
        run = max(path for path in runs if not path.is_symlink())  # `latest` is one
        change_lines(run / "trajectories.jsonl", change)
        server.spawn()
    await asyncio.to_thread(server.wait)
    clients.stop()
    await asking
    outcome = await clients.judge(run)
    await asyncio.to_thread(server.stop)
    return outcome


def as_trained(line: dict[str, object]) -> dict[str, object]:
    """What a step took counts as trained on, whatever checkpoint there is."""
    return {"gone": line["reserved"], "reason": "trained"} if "reserved" in line else line


def as_waiting(line: dict[str, object]) -> dict[str, object]:
    """What a step took waits."""
    return {} if "reserved" in line or line.get("reason") == "trained" else line


def change_lines(file: Path, change: Change) -> None:
    lines = []
    for text in file.read_text().splitlines():
        try:
            lines.append(json.dumps(change(json.loads(text))) + "\n")
        except json.JSONDecodeError:
            continue  # half a line
    file.write_text("".join(lines))
