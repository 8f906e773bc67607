"""The file of the buffer: what a later process finds."""

import asyncio
import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from parallm.errors import Unavailable, UnknownTrajectory
from parallm.rollout.live.traffic import LiveTraffic

Record = Callable[..., None]
Make = Callable[..., LiveTraffic]


def close(traffic: LiveTraffic) -> None:
    asyncio.run(traffic.close())


def test_what_waits_and_what_has_a_reward_is_there_after_a_restart(make: Make, record: Record) -> None:
    before = make()
    record(before, "1a", prompt=1, reward=1.0, metadata={"who": "me"})
    record(before, "1b", prompt=1)
    close(before)
    after = make()
    after.reward("1b", 0.1)
    record(after, "2a", prompt=2, reward=1.0)
    record(after, "2b", prompt=2, reward=0.0)
    assert after.is_ready(0, 0)
    first, _ = after.take().groups
    assert first.rewards == (1.0, 0.1)
    assert first.trajectories[0].logprobs == (-0.5, -0.25)


def test_what_was_trained_on_is_not_trained_on_again(make: Make, record: Record) -> None:
    before = make(group_by="request")
    for request in ("x", "y", "z"):
        for place in (0, 1):
            record(before, f"{request}{place}", request=request, n=2, reward=float(place))
    before.take()
    close(before)
    after = make(group_by="request")
    assert after.report().num_rewarded == 2
    with pytest.raises(Unavailable):
        after.reward("x0", 1.0)
    assert after.reward("z0", 1.0) == 1.0


def test_an_old_trajectory_is_as_old_after_a_restart(make: Make, record: Record, clock: Callable[[], float]) -> None:
    before = make(max_age_seconds=100)
    record(before, "a")
    close(before)
    clock.now += 101  # type: ignore[attr-defined]
    with pytest.raises(UnknownTrajectory):
        make(max_age_seconds=100).reward("a", 1.0)


def test_broken_lines_cost_themselves_only(make: Make, record: Record, file: Path) -> None:
    before = make()
    record(before, "a")
    close(before)
    file.write_text('{"added": {"trajectory_id": "b"}}\n[1]\n' + file.read_text() + '{"rewarded": "a", "rew')
    assert make().reward("a", 1.0) == 1.0


def test_a_file_that_grows_is_written_anew_with_what_is_left(make: Make, record: Record, file: Path) -> None:
    traffic = make(max_trajectories=2)
    for place in range(50):
        record(traffic, str(place), reward=1.0)
    close(traffic)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) <= 12
    assert make(max_trajectories=2).report().num_rewarded == 2


def test_only_its_owner_may_read_what_clients_have_sent(make: Make, record: Record, file: Path) -> None:
    traffic = make()
    record(traffic, "a")
    close(traffic)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    close(make())  # written anew
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_disk_that_refuses_costs_the_file_and_not_the_run(
    make: Make, record: Record, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.mkdir()
    traffic = make()
    record(traffic, "a", reward=1.0)
    close(traffic)
    assert [line.message[:12] for line in caplog.records] == ["cannot write"]
    assert traffic.report().num_rewarded == 1
