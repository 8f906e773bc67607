"""From completions and rewards to the groups of a step."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallm.errors import InvalidRequest, Unavailable, UnknownTrajectory
from parallm.rollout.live.source import MAX_NAMES, OTHER, LiveSource, PartNames, check_sampling
from parallm.types import GenerationRequest, SamplingParams, WeightSpan
from tests.rollout.live.conftest import settings_of

Record = Callable[..., None]
Make = Callable[..., LiveSource]


def rewards_of(source: LiveSource) -> list[tuple[float, ...]]:
    return [group.rewards for group in source.take(1).groups]


def two_groups(source: LiveSource, record: Record, names: str = "") -> None:
    for prompt in (1, 2):
        record(source, f"{names}{prompt}a", prompt=prompt, reward=1.0)
        record(source, f"{names}{prompt}b", prompt=prompt, reward=0.0)


def test_a_trajectory_holds_the_very_tokens_and_logprobs(source: LiveSource, record: Record) -> None:
    two_groups(source, record)
    one = source.take(1).groups[0].trajectories[0]
    assert (one.prompt_tokens, one.tokens, one.logprobs) == ((1, 8), (3, 4), (-0.5, -0.25))
    assert one.loss_mask == (True, True)
    assert one.weight_versions == (WeightSpan(version=0, start=0, end=2),)
    assert (one.reward, one.reward_parts, one.temperature) == (1.0, {"reward": 1.0}, 1.0)


def test_a_step_is_ready_when_enough_groups_of_a_prompt_have_their_rewards(source: LiveSource, record: Record) -> None:
    record(source, "1a", prompt=1, reward=1.0)
    record(source, "2a", prompt=2, reward=1.0)
    record(source, "1b", prompt=1, reward=0.0)
    record(source, "2b", prompt=2)
    assert not source.is_ready(0, 0)
    source.reward("2b", 0.0)
    assert source.is_ready(0, 0)
    assert rewards_of(source) == [(1.0, 0.0), (1.0, 0.0)]
    assert not source.is_ready(0, 0)


def test_what_is_missing_for_a_step_is_told_unless_time_brings_it(source: LiveSource, record: Record) -> None:
    assert "0 trajectories wait, 0 of them with a reward" in source.missing()
    record(source, "1a", prompt=1, reward=1.0)
    record(source, "1b", prompt=1)
    assert "2 trajectories wait, 1 of them with a reward" in source.missing()
    source.reward("1b", 1.0)
    assert "rewards that differ" in source.missing()
    source.reward("1b", 0.0)
    assert not source.is_ready(0, 0)  # a second group is to come, for which a step waits `wait_seconds` at most
    assert source.missing() == ""


def test_groups_without_signal_are_reported_and_do_not_count(source: LiveSource, record: Record) -> None:
    for place, prompt in enumerate((1, 2, 3)):
        record(source, f"{prompt}a", prompt=prompt, reward=1.0)
        record(source, f"{prompt}b", prompt=prompt, reward=1.0 if place == 0 else 0.0)
    batch = source.take(1)
    assert [group.rewards for group in batch.groups] == [(1.0, 1.0), (1.0, 0.0), (1.0, 0.0)]
    assert [group.rewards for group in batch.with_signal] == [(1.0, 0.0), (1.0, 0.0)]
    assert batch.trained == batch.with_signal


def test_groups_without_signal_are_trained_on_where_the_learner_needs_all(source: LiveSource, record: Record) -> None:
    for prompt, other in ((1, 1.0), (2, 0.0), (3, 0.0)):
        record(source, f"{prompt}a", prompt=prompt, reward=1.0)
        record(source, f"{prompt}b", prompt=prompt, reward=other)
    batch = source.take(1, needs_all_groups=True)
    assert [group.rewards for group in batch.trained] == [(1.0, 1.0), (1.0, 0.0), (1.0, 0.0)]
    assert batch.with_signal == batch.trained[1:]
    source.failed(1, [(0, 1)])  # a culprit is counted in what was trained on
    with pytest.raises(UnknownTrajectory, match=r"no trajectory '1b' waits for a reward: it was dropped \(fault\)"):
        source.reward("1b", 0.5)


def test_a_step_waits_for_as_many_groups_with_signal_however_many_there_are_without(
    source: LiveSource, record: Record
) -> None:
    for prompt, other in ((1, 1.0), (2, 1.0), (3, 0.0)):
        record(source, f"{prompt}a", prompt=prompt, reward=1.0)
        record(source, f"{prompt}b", prompt=prompt, reward=other)
    assert not source.is_ready(0, 0)
    record(source, "4a", prompt=4, reward=1.0)
    record(source, "4b", prompt=4, reward=0.0)
    assert source.is_ready(0, 0)


def test_what_is_more_than_a_step_stays_for_the_next(source: LiveSource, record: Record) -> None:
    for prompt in (1, 2, 3):
        record(source, f"{prompt}a", prompt=prompt, reward=1.0)
        record(source, f"{prompt}b", prompt=prompt, reward=0.0)
    assert len(source.take(1).groups) == 2
    assert source.report().num_rewarded == 2


def test_a_reward_that_waited_long_enough_needs_no_whole_group_and_no_whole_step(
    make: Make, record: Record, clock: Any
) -> None:
    source = make(wait_seconds=10)
    record(source, "a", prompt=1, reward=1.0)
    clock.now += 9
    assert not source.is_ready(0, 0)
    clock.now += 2
    assert not source.is_ready(0, 0)  # alone it can be compared with nothing
    record(source, "b", prompt=1, reward=0.0)
    assert source.is_ready(0, 0)
    assert rewards_of(source) == [(1.0, 0.0)]


def test_completions_of_one_request_are_a_group_whatever_others_say_to_its_prompt(make: Make, record: Record) -> None:
    source = make(group_by="request")
    for request in ("x", "y"):
        for place, reward in enumerate((1.0, 0.0, 0.5)):
            record(source, f"{request}{place}", request=request, n=3, reward=reward)
    assert source.is_ready(0, 0)
    assert rewards_of(source) == [(1.0, 0.0, 0.5)] * 2


def test_without_groups_a_step_is_as_many_completions_of_any_prompt(make: Make, record: Record) -> None:
    source = make(group_by="none")
    for prompt, reward in enumerate((1.0, 0.0, 0.5)):
        record(source, str(prompt), prompt=prompt, reward=reward)
    assert not source.is_ready(0, 0)
    record(source, "3", prompt=3, reward=0.25)
    assert source.is_ready(0, 0)
    batch = source.take(1)
    assert [group.rewards for group in batch.with_signal] == [(1.0,), (0.0,), (0.5,), (0.25,)]
    assert len({group.trajectories[0].prompt_tokens for group in batch.groups}) == 4


def test_the_last_reward_counts_until_a_step_takes_it(source: LiveSource, record: Record) -> None:
    two_groups(source, record)
    source.reward("1b", 0.75)
    assert rewards_of(source)[0] == (1.0, 0.75)
    with pytest.raises(Unavailable, match="'1b' is being trained on with another reward"):
        source.reward("1b", 0.5)
    source.saved(1)
    with pytest.raises(Unavailable, match="'1b' was trained on already"):
        source.reward("1b", 0.5)


def test_a_reward_that_comes_again_is_right_at_any_time(source: LiveSource, record: Record) -> None:
    two_groups(source, record)
    for act in (lambda: None, lambda: source.take(1), lambda: source.saved(1)):
        act()
        assert source.reward("1a", 1.0) == 1.0
    assert source.report().num_trained == 4


def test_what_a_step_takes_is_trained_on_when_a_checkpoint_holds_the_step(source: LiveSource, record: Record) -> None:
    two_groups(source, record)
    assert source.is_ready(0, 0)
    source.take(1)
    assert not source.is_ready(0, 0)
    report = source.report()
    assert (report.num_waiting, report.num_rewarded, report.num_reserved, report.num_trained) == (0, 0, 4, 0)
    source.saved(0)
    assert source.report().num_reserved == 4
    source.saved(1)
    assert (source.report().num_reserved, source.report().num_trained) == (0, 4)


def test_after_a_fault_the_culprits_go_and_the_others_wait_again(source: LiveSource, record: Record) -> None:
    two_groups(source, record)
    source.take(1)
    source.failed(1, [(1, 0)])
    assert source.report().dropped == {"fault": 1}
    assert source.report().num_rewarded == 3
    record(source, "2c", prompt=2, reward=1.0)
    assert source.is_ready(0, 0)
    assert rewards_of(source) == [(1.0, 0.0), (0.0, 1.0)]


@pytest.mark.parametrize("culprits", [[], [(group, place) for group in range(2) for place in range(2)]], ids=str)
def test_where_no_culprit_is_known_all_wait_again_but_not_for_ever(
    source: LiveSource, record: Record, culprits: list[tuple[int, int]]
) -> None:
    two_groups(source, record)
    for step in (1, 2, 3):
        assert source.is_ready(0, 0)
        source.take(step)
        source.failed(step, culprits)
    assert source.report().dropped == {"fault": 4}
    assert not source.is_ready(0, 0)


def test_without_groups_a_culprit_is_found_all_the_same(make: Make, record: Record) -> None:
    source = make(group_by="none")
    for name, reward in (("a", 1.0), ("b", 0.0), ("c", 0.5), ("d", 0.2)):
        record(source, name, reward=reward)
    source.take(1)
    source.failed(1, [(2, 0)])
    with pytest.raises(UnknownTrajectory, match=r"no trajectory 'c' waits for a reward: it was dropped \(fault\)"):
        source.reward("c", 0.5)


def test_what_an_undone_version_has_learned_from_is_dropped_and_the_ages_of_others_are_right(
    source: LiveSource, record: Record
) -> None:
    two_groups(source, record)
    source.take(1)
    source.learned()
    source.saved(1)
    for version in (6, 7):
        record(source, f"{version}", version=version, prompt=version, reward=1.0)
    source.undone(version=6, now=8)  # version 7 was made by step 1
    assert (source.report().num_trained, source.report().dropped) == (0, {"undone": 4})
    assert source.is_ready(version=8, limit=0) is False
    assert source.report().dropped == {"undone": 4, "stale": 1}  # 7 is one update away from 6, and 6 is 8 now


def test_more_reserved_ones_than_the_buffer_may_hold_count_as_trained(
    make: Make, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    source = make(max_trajectories=4)
    for step in (1, 2):
        two_groups(source, record, names=f"{step}-")
        source.take(step)
    assert (source.report().num_reserved, source.report().num_trained) == (4, 4)
    assert "lower checkpoint.every" in caplog.text


def test_parts_are_weighed_by_name(make: Make, record: Record) -> None:
    source = make(weights={"short": 0.5, "spam": 0.0})
    record(source, "a")
    assert source.reward("a", {"right": 1.0, "short": 0.5, "spam": 9.0}) == 1.25


@pytest.mark.parametrize(
    "reward",
    [1e39, -1e39, 1e308, 1.1e9, float("inf"), float("nan"), {"a": 1e9, "b": 1e9}, {"a": 1e308, "free": 1e308}],
    ids=str,
)
def test_a_reward_that_a_step_could_not_compute_with_is_refused(make: Make, record: Record, reward: Any) -> None:
    source = make(weights={"free": 0.0})
    record(source, "a")
    with pytest.raises(InvalidRequest, match=r"the reward holds .*; the limit is 1e\+09 either way"):
        source.reward("a", reward)
    assert source.report().num_rewarded == 0


def test_a_negative_reward_is_refused_where_the_advantage_knows_none(file: Path, clock: Any, record: Record) -> None:
    source = LiveSource(settings_of(), file, clock, min_reward=0.0)
    record(source, "a", reward=0.0)
    with pytest.raises(InvalidRequest, match=r"the reward is -1; learner.advantage=max_rl needs rewards of 0 or more"):
        source.reward("a", -1.0)


def test_a_reward_for_an_unknown_id_is_refused(source: LiveSource) -> None:
    with pytest.raises(UnknownTrajectory, match="'nobody'"):
        source.reward("nobody", 1.0)


def test_what_is_too_old_leaves_by_age_and_is_counted_by_reason(make: Make, record: Record, clock: Any) -> None:
    source = make(max_age_seconds=100, wait_seconds=1000)
    record(source, "a")
    record(source, "b", reward=1.0)
    clock.now += 101
    with pytest.raises(UnknownTrajectory, match="older than 100 s"):
        source.reward("a", 1.0)
    report = source.report()
    assert report.dropped == {"no_reward": 1, "unused": 1}
    assert (report.num_waiting, report.num_rewarded, report.num_collected) == (0, 0, 2)


def test_the_oldest_goes_where_there_are_too_many(make: Make, record: Record) -> None:
    source = make(max_trajectories=2)
    for name in "abc":
        record(source, name)
    assert source.report().dropped == {"full": 1}
    with pytest.raises(UnknownTrajectory):
        source.reward("a", 1.0)
    assert source.reward("b", 1.0) == 1.0


def test_a_rewarded_one_goes_last_where_there_are_too_many(make: Make, record: Record) -> None:
    source = make(max_trajectories=3)
    record(source, "a", reward=1.0)
    for name in "bcde":
        record(source, name)
    assert [one.trajectory_id for one in source._buffer] == ["a", "d", "e"]
    for name in "de":
        source.reward(name, 0.0)
    record(source, "f")
    assert [one.trajectory_id for one in source._buffer] == ["d", "e", "f"]


def test_versions_beyond_the_limit_and_abandoned_ones_are_dropped(source: LiveSource, record: Record) -> None:
    for version in (2, 3, 4, 5):
        record(source, str(version), version=version, reward=1.0)
    source.is_ready(version=4, limit=1)
    assert source.report().dropped == {"stale": 2}
    assert source.report().num_rewarded == 2
    assert source.take(1).num_stale == 2
    assert source.take(1).num_stale == 0


def test_aborted_completions_and_those_of_no_tokens_are_not_taken(source: LiveSource, record: Record) -> None:
    record(source, "a", finish_reason="abort")
    record(source, "b", tokens=(), logprobs=(), weight_versions=())
    assert source.report().dropped == {"aborted": 1, "no_tokens": 1}
    assert source.report().num_waiting == 0


@pytest.mark.parametrize("state", ["waiting", "reserved", "trained", "dropped"])
def test_an_id_that_comes_again_never_takes_the_place_of_the_first(
    make: Make, record: Record, clock: Any, state: str
) -> None:
    source = make(max_age_seconds=100)
    two_groups(source, record)
    if state == "dropped":
        clock.now += 101
        source.report()
    elif state != "waiting":
        source.take(1)
        source.saved(0 if state == "reserved" else 1)
    before = source.report()
    assert source.knows("1a")
    assert not source.knows("1c")
    record(source, "1a")
    after = source.report()
    assert after.dropped == {**before.dropped, "id_in_use": 1}
    assert (after.num_waiting, after.num_rewarded) == (before.num_waiting, before.num_rewarded)


def test_a_jump_of_the_systems_clock_makes_nothing_older(
    file: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = LiveSource(settings_of(), file)
    record(source, "a")
    wall = time.time
    for hours in (1, -1, 10_000):
        monkeypatch.setattr(time, "time", lambda hours=hours: wall() + 3600 * hours)
        assert source.report().num_waiting == 1
        assert source.report().oldest_seconds < 60


@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("temperature", 0.0)], ids=str
)
def test_what_is_not_sampled_from_the_policy_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_sampling(SamplingParams(max_tokens=4, **{name: value}))  # type: ignore[arg-type]
    assert raised.value.parameter == name


def test_texts_of_a_given_form_are_no_samples_of_the_policy() -> None:
    class Anything:
        def start(self) -> Any:
            raise AssertionError("nothing is sampled")

    with pytest.raises(InvalidRequest, match="which these are not with response_format"):
        check_sampling(SamplingParams(max_tokens=4, grammar=Anything()))


def test_lengths_seeds_and_stops_are_free() -> None:
    check_sampling(SamplingParams(max_tokens=9, temperature=0.5, seed=3, stop=("x",), stop_token_ids=(1,)))


def test_a_single_completion_is_refused_where_requests_are_groups(make: Make) -> None:
    source = make(group_by="request")
    with pytest.raises(InvalidRequest, match="n of 2 or more"):
        source.check(_request(1), None, {})
    source.check(_request(2), None, {})


def test_metadata_that_is_too_large_is_refused_without_quoting_it(make: Make) -> None:
    with pytest.raises(InvalidRequest, match="metadata has 30 bytes as JSON, the limit is 10") as raised:
        make(max_metadata_bytes=10).check(_request(1), None, {"secret": "x" * 16})
    assert "xx" not in str(raised.value)


def test_nothing_is_collected_after_the_end_of_training(source: LiveSource) -> None:
    source.end()
    with pytest.raises(Unavailable, match="training has ended"):
        source.check(_request(1), None, {})


def _request(n: int) -> GenerationRequest:
    return GenerationRequest(request_id="r#0", prompt_tokens=(1,), sampling=SamplingParams(max_tokens=4), n=n)


def test_names_beyond_the_first_count_as_other() -> None:
    names = PartNames(["weighted"])
    for number in range(MAX_NAMES):
        names.bounded({f"part {number}": 1.0})
    parts = names.bounded({"weighted": 1.0, "part 0": 2.0, "part 63": 4.0, "late": 8.0})
    assert parts == {"weighted": 1.0, "part 0": 2.0, OTHER: 12.0}


def test_the_reward_counts_each_part_under_its_own_weight_whatever_its_column(make: Make, record: Record) -> None:
    source = make(weights={"right": 2.0})
    record(source, "a")
    record(source, "b")
    for number in range(MAX_NAMES):
        source.reward("a", {f"part {number}": 1.0})
    assert source.reward("b", {"right": 1.0, "late": 0.5, "later": 0.25}) == 2.75
    _, rewarded = source._buffer
    assert rewarded.trajectory.reward_parts == {"right": 1.0, OTHER: 0.75}
