from typing import Any

from parallm.rollout.live.source import MAX_NAMES, OTHER, PartNames


def test_names_beyond_the_first_count_as_other() -> None:
    names = PartNames(["weighted"])
    for place in range(MAX_NAMES):
        names.bounded({f"part {place}": 1.0})
    found = names.bounded({"weighted": 1.0, "part 0": 2.0, "part 63": 4.0, "late": 8.0})
    assert found == {"weighted": 1.0, "part 0": 2.0, OTHER: 12.0}


def test_the_reward_counts_each_part_under_its_own_weight_whatever_its_column(make: Any, record: Any) -> None:
    traffic = make(weights={"right": 2.0})
    record(traffic, "a")
    record(traffic, "b")
    for place in range(MAX_NAMES):
        traffic.reward("a", {f"part {place}": 1.0})
    assert traffic.reward("b", {"right": 1.0, "late": 0.5, "later": 0.25}) == 2.75
    _, rewarded = traffic._buffer
    assert rewarded.trajectory.reward_parts == {"right": 1.0, OTHER: 0.75}
