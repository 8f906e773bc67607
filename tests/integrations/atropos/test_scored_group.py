"""What environments post: read where it is sound, refused with a reason where it is not."""

import math
from typing import Any

import numpy as np
import pytest

from parallm.integrations.atropos.scored_group import GroupRefused, Limits, ScoredGroup, read_group
from tests.integrations.atropos.conftest import group_of

LIMITS = Limits(max_tokens=8, num_token_ids=50)
PAIR = group_of(((7, 8), (1, 2, 3)), ((7, 8), (4,)))


def read(**changes: Any) -> ScoredGroup:
    return read_group({**PAIR, **changes}, LIMITS)


def test_masks_say_what_is_trained_and_lengths_may_differ() -> None:
    group = read(env_id=3)
    assert [one.tokens_T.tolist() for one in group.sequences] == [[7, 8, 1, 2, 3], [7, 8, 4]]
    assert group.sequences[0].trained_T.tolist() == [False, False, True, True, True]
    assert [one.score for one in group.sequences] == [0.0, 1.0]
    assert group.env_id == 3


@pytest.mark.parametrize("absent", [None, []])
def test_null_and_empty_lists_are_absent(absent: object) -> None:
    names = ("inference_logprobs", "advantages", "ref_logprobs", "overrides", "messages", "images", "group_overrides")
    group = read(**dict.fromkeys(names, absent), generation_params=None, env_id=None)
    for one in group.sequences:
        assert (one.logprobs_T, one.advantages_T, one.temperature, one.is_zeroed) == (None, None, None, False)


def test_the_temperature_of_a_sequence_goes_before_that_of_the_sampling_and_the_group() -> None:
    overrides = [{"temperature": 0.5}, None]
    group = read(overrides=overrides, generation_params={"temperature": 0.7}, group_overrides={"temperature": 0.9})
    assert [one.temperature for one in group.sequences] == [0.5, 0.7]
    assert read(group_overrides={"temperature": 0.9}).sequences[0].temperature == 0.9


def test_overrides_set_advantages_to_zero_and_name_demonstrations() -> None:
    group = read(overrides=[{"set_advantage_to_zero": True}, {"sft": True}])
    assert [(one.is_zeroed, one.is_demonstration) for one in group.sequences] == [(True, False), (False, True)]
    assert all(one.is_demonstration for one in read(group_overrides={"sft": True}).sequences)


def test_advantages_and_log_probs_are_of_the_token_at_their_place() -> None:
    group = read(
        advantages=[[0, 0, 1.5, -2, 0], [0, 0, 3]], inference_logprobs=[[1, 1, -0.1, -0.2, -0.3], [1.0, 1.0, -0.4]]
    )
    first = group.sequences[0]
    assert first.advantages_T is not None
    assert first.logprobs_T is not None
    assert first.advantages_T.tolist() == [0, 0, 1.5, -2, 0]
    np.testing.assert_allclose(first.logprobs_T[first.trained_T], [-0.1, -0.2, -0.3], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": None}, "malformed"),
        ({"tokens": []}, "empty"),
        ({"tokens": [[7, 8, 1, 2, 3], "74"]}, "malformed"),
        ({"tokens": [[7, 8, 1, 2, 3], [7, 8.5, 4]]}, "malformed"),
        ({"tokens": [[7, 8, 1, 2, 3], [7, [8], 4]]}, "malformed"),
        ({"tokens": [[7, 8, 1, 2, 3], [7, 8, 2**70]]}, "malformed"),
        ({"masks": [[-100, -100, 1, 2, 3]]}, "ragged"),
        ({"masks": [[-100, -100, 1, 2, 3], [-100, -100]]}, "ragged"),
        ({"scores": [1.0]}, "ragged"),
        ({"scores": [1.0, None]}, "malformed"),
        ({"scores": [1.0, math.nan]}, "not_finite"),
        ({"scores": [1.0, math.inf]}, "not_finite"),
        ({"scores": [1.0, 1e39]}, "too_large"),
        ({"scores": [1.0, -(10**400)]}, "too_large"),
        ({"advantages": [[0, 0, 0, 0, 1e38], [0, 0, 0]]}, "too_large"),
        ({"tokens": [[7, 8, 1, 2, 3], [7] * 9]}, "too_long"),
        ({"tokens": [[7, 8, 1, 2, 3], [7, 8, 50]], "masks": [[-100] * 5, [-100, -100, 50]]}, "unknown_token"),
        ({"tokens": [[7, 8, 1, 2, 3], [-1, 8, 4]]}, "unknown_token"),
        ({"masks": [[-100, -100, 1, 2, 3], [-100, -100, 5]]}, "wrong_mask"),
        ({"masks": [[7, -100, 1, 2, 3], [-100, -100, 4]]}, "wrong_mask"),
        ({"masks": [[-100] * 5, [-100] * 3]}, "no_trained_token"),
        ({"inference_logprobs": [[1, 1, 1, -1, -1], [1, 1, -1]]}, "wrong_logprobs"),  # shifted by one
        ({"inference_logprobs": [[1, 1, -1, -1, -math.inf], [1, 1, -1]]}, "not_finite"),
        ({"inference_logprobs": [[1, 1, -1, -1], [1, 1, -1]]}, "ragged"),
        ({"inference_logprobs": [[1, 1, -1, -1, -1]]}, "ragged"),
        ({"advantages": [[0, 0, 0, 0, math.nan], [0, 0, 0]]}, "not_finite"),
        ({"advantages": [1.0, 2.0]}, "malformed"),
        ({"overrides": [{}, {}, {}]}, "ragged"),
        ({"overrides": [1, 2]}, "malformed"),
        ({"generation_params": [1]}, "malformed"),
        ({"group_overrides": {"temperature": "hot"}}, "malformed"),
        ({"group_overrides": {"temperature": -1}}, "malformed"),
        ({"images": ["x"]}, "images"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(GroupRefused) as refused:
        read(**changes)
    assert refused.value.reason == reason


@pytest.mark.parametrize("value", [None, 1, "group", [PAIR]])
def test_something_else_than_a_group_is_refused(value: object) -> None:
    with pytest.raises(GroupRefused, match="malformed"):
        read_group(value, LIMITS)


def test_numbers_that_are_not_finite_do_not_matter_where_nothing_is_trained() -> None:
    assert read(inference_logprobs=[[math.nan, 1, -1, -1, -1], [1, math.inf, -1]]).sequences


def test_a_sequence_without_a_trained_token_has_a_score_all_the_same() -> None:
    group = read(masks=[[-100] * 5, [-100, -100, 4]])
    assert [sequence.trained_T.sum() for sequence in group.sequences] == [0, 1]
