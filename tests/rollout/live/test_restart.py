"""The file of the buffer: what a later process finds."""

import asyncio
import json
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallm.errors import NotStored, Unavailable
from parallm.rollout.live.buffer import MAX_ABANDONED
from parallm.rollout.live.journal import read_journal
from parallm.rollout.live.source import LiveSource

Record = Callable[..., None]
Make = Callable[..., LiveSource]


def close(source: LiveSource) -> None:
    asyncio.run(source.close())


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
    first, _ = after.take(1).groups
    assert first.rewards == (1.0, 0.1)
    assert first.trajectories[0].logprobs == (-0.5, -0.25)


def three_requests(source: LiveSource, record: Record) -> None:
    for request in ("x", "y", "z"):
        for place in (0, 1):
            record(source, f"{request}{place}", request=request, n=2, version=4, reward=float(place))


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("is_told", [True, False])
def test_what_a_checkpoint_holds_is_trained_on_and_all_else_waits_again(
    make: Make, record: Record, is_saved: bool, is_told: bool
) -> None:
    before = make(group_by="request")
    three_requests(before, record)
    before.take(5)
    if is_told:  # the process may end between the checkpoint and the line that says so
        before.saved(5 if is_saved else 4)
    close(before)
    for _ in range(2):
        after = make(group_by="request")
        after.resume(5 if is_saved else 4, version=4, now=4)
        report = after.report()
        assert (report.num_rewarded, report.num_trained) == ((2, 4) if is_saved else (6, 0))
        assert (report.num_collected, report.num_reserved, report.dropped) == (6, 0, {})
        assert after.reward("x1", 1.0) == 1.0  # the client did not hear of it
        if is_saved:
            with pytest.raises(Unavailable, match="'x0' was trained on already"):
                after.reward("x0", 1.0)
        close(after)
    assert after.is_ready(4, 0) != is_saved


def test_a_step_number_that_comes_again_means_what_it_took_this_time(make: Make, record: Record) -> None:
    first = make(group_by="request")
    three_requests(first, record)
    first.take(5)
    close(first)
    second = make(group_by="request")
    second.resume(3, version=4, now=4)
    second.saved(5)  # its steps 4 and 5 took nothing of these
    close(second)
    third = make(group_by="request")
    third.resume(5, version=4, now=4)
    assert (third.report().num_trained, third.report().num_rewarded) == (0, 6)


def test_what_one_process_after_the_other_has_ended_with_is_dropped_in_the_end(
    make: Make, record: Record, clock: Any
) -> None:
    source = make(group_by="request")
    three_requests(source, record)
    clock.now += 1
    record(source, "new", request="w", n=2, version=4, reward=1.0)
    for number in range(MAX_ABANDONED):
        assert source.report().num_rewarded == 7, number
        source.take(1)
        source.take(2)
        close(source)
        source = make(group_by="request")
        source.resume(0, version=4, now=4)
    assert (source.report().num_rewarded, source.report().dropped) == (1, {"fault": 6})


def test_a_restart_says_how_many_wait(make: Make, record: Record, file: Path) -> None:
    before = make(group_by="request")
    assert before.resume(0, version=0, now=0) == ""
    close(before)
    assert not file.exists(), "nothing was collected"
    before = make(group_by="request")
    three_requests(before, record)
    record(before, "w", version=4)
    before.take(5)
    close(before)
    text = make(group_by="request").resume(4, version=4, now=4)
    assert text == "7 trajectories wait, 6 with a reward, 4 of steps after the checkpoint"


def test_what_abandoned_versions_said_is_as_old_as_its_weights_are_far(make: Make, record: Record) -> None:
    before = make()
    for version in (4, 5, 6, 7):
        record(before, str(version), prompt=version, version=version, reward=1.0)
    close(before)
    for _ in range(2):
        after = make()
        after.resume(5, version=5, now=5)
        assert after.is_ready(5, 1) is False
        assert after.report().dropped == {"stale": 1}
        close(after)
    record(after := make(), "new", prompt=6, version=6, reward=0.0)
    after.is_ready(6, 1)  # a step of this process has made another version 6
    assert after.report().dropped == {"stale": 3}  # 4, and the abandoned 6, which is two updates away
    assert after.report().num_rewarded == 2


def test_only_time_in_which_the_run_is_there_makes_a_trajectory_older(
    make: Make, record: Record, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = make(max_age_seconds=100)
    record(before, "a")
    clock.now += 60
    record(before, "b")
    close(before)
    clock.now = 5.0  # the machine was started again
    monkeypatch.setattr(time, "time", lambda: 4e9)
    after = make(max_age_seconds=100)
    clock.now += 39
    assert after.reward("a", 1.0) == 1.0
    clock.now += 2
    assert after.report().dropped == {"unused": 1}
    assert after.reward("b", 1.0) == 1.0


def test_counts_are_those_of_the_run(make: Make, record: Record) -> None:
    source = make(max_trajectories=2)
    for name in "abc":
        record(source, name, reward=1.0)
    record(source, "d", finish_reason="abort")
    for _ in range(3):
        close(source)
        source = make(max_trajectories=2)
        report = source.report()
        assert (report.num_collected, report.num_rewarded) == (4, 2)
        assert report.dropped == {"aborted": 1, "full": 1}


def test_a_file_of_an_earlier_version_is_read(make: Make, record: Record, file: Path) -> None:
    before = make()
    for name in "ab":
        record(before, name, reward=1.0)
    close(before)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line.get("added", {}).pop("num_failed", None)
    old = [{"gone": ["t"], "reason": "trained"}, *lines, {"gone": ["b"], "reason": "trained"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in old))
    after = make()
    after.resume(0, version=0, now=0)
    assert (after.report().num_rewarded, after.report().num_trained) == (1, 1)
    with pytest.raises(Unavailable):
        after.reward("t", 1.0)


@pytest.mark.parametrize("size", range(1, 400, 37))
def test_a_process_that_is_killed_within_a_line_loses_that_line_alone(
    make: Make, record: Record, file: Path, size: int
) -> None:
    before = make()
    record(before, "a")
    close(before)
    whole = file.read_bytes()
    record(before := make(), "b")
    close(before)
    file.write_bytes(whole + file.read_bytes()[len(whole) :][:size])
    after = make()
    after.reward("a", 1.0)
    close(after)
    assert make().report().num_rewarded == 1


def rewards_in(file: Path) -> list[float]:
    return [line["reward"] for line in read_journal(file) if "rewarded" in line]


def test_what_was_answered_is_in_the_file_and_what_the_disk_refuses_is_not_answered_as_if_it_were(
    make: Make, record: Record, file: Path
) -> None:
    async def reward(source: LiveSource, value: float) -> None:
        source.reward("a", value)
        await source.written()

    async def main() -> None:
        source = make()
        record(source, "a")
        await reward(source, 1.0)
        assert rewards_in(file) == [1.0]
        good = file.rename(file.with_name("aside"))
        file.mkdir()
        with pytest.raises(NotStored, match="it counts for now, but the disk does not take it"):
            await reward(source, 0.5)
        file.rmdir()
        good.rename(file)
        await reward(source, 0.25)
        assert rewards_in(file) == [1.0, 0.5, 0.25]
        await source.close()

    asyncio.run(main())


def test_broken_lines_cost_themselves_only(make: Make, record: Record, file: Path) -> None:
    before = make()
    record(before, "a")
    close(before)
    file.write_text('{"added": {"trajectory_id": "b"}}\n[1]\n' + file.read_text() + '{"rewarded": "a", "rew')
    assert make().reward("a", 1.0) == 1.0


def test_a_file_that_grows_is_written_anew_with_what_is_left(make: Make, record: Record, file: Path) -> None:
    source = make(max_trajectories=2)
    for place in range(50):
        record(source, str(place), reward=1.0)
    close(source)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) <= 12
    assert make(max_trajectories=2).report().num_rewarded == 2


def test_only_its_owner_may_read_what_clients_have_sent(make: Make, record: Record, file: Path) -> None:
    source = make()
    record(source, "a")
    close(source)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    close(make())  # written anew
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_disk_that_refuses_costs_the_file_and_not_the_run(
    make: Make, record: Record, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.mkdir()
    source = make()
    record(source, "a", reward=1.0)
    close(source)
    assert [line.message[:12] for line in caplog.records] == ["cannot write"]
    assert source.report().num_rewarded == 1
