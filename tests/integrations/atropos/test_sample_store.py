"""Which completion a posted token is from: by exact tokens, and never by guessing."""

from dataclasses import dataclass

import numpy as np
import pytest

from parallm.integrations.atropos.sample_store import SampleStore, SamplingRecord
from parallm.types import WeightSpan
from tests.integrations.atropos.conftest import atropos_settings, completion_of, request_of

PROMPT = (7, 8)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sample_store(clock: Clock) -> SampleStore:
    return SampleStore(atropos_settings(ledger_tokens=1000, ledger_seconds=60), clock)


def find(
    sample_store: SampleStore, prompt: tuple[int, ...], *turns: tuple[int, ...], logprobs: list[float] | None = None
) -> SamplingRecord | None:
    """A sequence of a prompt, a trained turn, a masked turn, a trained turn and so on."""
    tokens = [*prompt, *(token for turn in turns for token in turn)]
    trained = [False] * len(prompt)
    for place, turn in enumerate(turns):
        trained += [place % 2 == 0] * len(turn)
    posted = None if logprobs is None else np.array([1.0] * len(prompt) + logprobs, np.float32)
    return sample_store.find(np.array(tokens, np.int32), np.array(trained), posted)


def test_versions_log_probs_and_temperature_are_those_of_the_completion(sample_store: SampleStore) -> None:
    made = completion_of((1, 2, 3), logprobs=(-0.1, -0.2, -0.3))
    switched = (WeightSpan(version=4, start=0, end=2), WeightSpan(version=5, start=2, end=3))
    object.__setattr__(made, "weight_versions", switched)
    sample_store.record(request_of(PROMPT, temperature=0.7), [made])
    found = find(sample_store, PROMPT, (1, 2, 3))
    assert found is not None
    np.testing.assert_array_equal(found.logprobs_T[2:], np.array([-0.1, -0.2, -0.3], np.float32))
    assert found.versions_T[2:].tolist() == [4, 4, 5]
    assert (found.temperature, found.is_filtered, found.finish_reason) == (0.7, False, "stop")


@pytest.mark.parametrize("tokens", [(1, 2, 4), (2, 1, 3), (1, 2, 3, 4), (9, 1, 2, 3)])
def test_other_tokens_are_not_found(sample_store: SampleStore, tokens: tuple[int, ...]) -> None:
    sample_store.record(request_of(PROMPT), [completion_of((1, 2, 3))])
    assert find(sample_store, PROMPT, tokens) is None


def test_the_same_tokens_behind_another_prompt_are_not_found(sample_store: SampleStore) -> None:
    sample_store.record(request_of(PROMPT), [completion_of((1, 2, 3))])
    assert find(sample_store, (8, 7), (1, 2, 3)) is None
    assert find(sample_store, (7, 8, 9), (1, 2, 3)) is None
    assert find(sample_store, (7,), (1, 2, 3)) is None


def test_the_beginning_of_a_completion_is_found(sample_store: SampleStore) -> None:
    sample_store.record(request_of(PROMPT), [completion_of((1, 2, 3), logprobs=(-0.1, -0.2, -0.3))])
    found = find(sample_store, PROMPT, (1, 2))
    assert found is not None
    np.testing.assert_array_equal(found.logprobs_T[2:], np.array([-0.1, -0.2], np.float32))


def test_turns_are_completions_of_all_before_them(sample_store: SampleStore) -> None:
    sample_store.record(request_of(PROMPT), [completion_of((1, 2), version=1)])
    sample_store.record(request_of((*PROMPT, 1, 2, 30, 31)), [completion_of((3, 4), version=2)])
    found = find(sample_store, PROMPT, (1, 2), (30, 31), (3, 4))
    assert found is not None
    assert found.versions_T.tolist() == [0, 0, 1, 1, 0, 0, 2, 2]


def test_a_turn_that_was_not_sampled_here_makes_the_whole_sequence_unknown(sample_store: SampleStore) -> None:
    sample_store.record(request_of(PROMPT), [completion_of((1, 2))])
    assert find(sample_store, PROMPT, (1, 2), (30, 31), (3, 4)) is None


def test_a_completion_that_goes_on_where_one_was_cut_is_the_one_that_counts(sample_store: SampleStore) -> None:
    sample_store.record(request_of(PROMPT), [completion_of((1, 2, 3, 9), version=1)])
    sample_store.record(request_of((*PROMPT, 1, 2)), [completion_of((3, 4), version=2)])
    found = find(sample_store, PROMPT, (1, 2, 3, 4))
    assert found is not None
    assert found.versions_T[2:].tolist() == [1, 1, 2, 2]


def test_a_later_turn_with_the_first_one_masked_is_found(sample_store: SampleStore) -> None:
    sample_store.record(request_of((*PROMPT, 1, 2, 30)), [completion_of((3, 4), version=2)])
    assert find(sample_store, (*PROMPT, 1, 2, 30), (3, 4)) is not None


def test_turns_at_different_temperatures_have_none(sample_store: SampleStore) -> None:
    sample_store.record(request_of(PROMPT, temperature=0.5), [completion_of((1,))])
    sample_store.record(request_of((*PROMPT, 1, 30), temperature=1.0), [completion_of((2,))])
    found = find(sample_store, PROMPT, (1,), (30,), (2,))
    assert found is not None
    assert np.isnan(found.temperature)


def test_of_equal_completions_the_posted_log_probs_tell_which(sample_store: SampleStore) -> None:
    for version, logprob in ((1, -0.5), (2, -0.6), (3, -0.7)):
        sample_store.record(request_of(PROMPT), [completion_of((1, 2), version=version, logprobs=(logprob, logprob))])
    found = find(sample_store, PROMPT, (1, 2), logprobs=[-0.6, -0.6])
    assert found is not None
    assert found.versions_T[2:].tolist() == [2, 2]


def test_of_equal_completions_without_log_probs_each_is_taken_in_turn(sample_store: SampleStore) -> None:
    for version in (1, 2):
        sample_store.record(request_of(PROMPT), [completion_of((1, 2), version=version)])
    found = [find(sample_store, PROMPT, (1, 2)) for _ in range(2)]
    assert [int(one.versions_T[-1]) for one in found if one is not None] == [1, 2]


def test_the_longest_of_several_beginnings_counts(sample_store: SampleStore) -> None:
    sample_store.record(request_of(PROMPT), [completion_of((1,), version=1), completion_of((1, 2, 3), version=2)])
    found = find(sample_store, PROMPT, (1, 2, 3))
    assert found is not None
    assert found.versions_T[2:].tolist() == [2, 2, 2]


def test_a_filtered_sample_is_known_as_one(sample_store: SampleStore) -> None:
    sample_store.record(request_of(PROMPT, top_p=0.9), [completion_of((1,))])
    found = find(sample_store, PROMPT, (1,))
    assert found is not None
    assert found.is_filtered


def test_evaluations_and_probes_leave_by_age(sample_store: SampleStore, clock: Clock) -> None:
    sample_store.record(request_of(PROMPT), [completion_of((1, 2)), completion_of((3,))])
    assert find(sample_store, PROMPT, (1, 2)) is not None
    clock.now += 61
    sample_store.record(request_of((9, 9)), [completion_of((1,))])
    assert find(sample_store, PROMPT, (1, 2)) is None
    assert (sample_store.num_completions, sample_store.num_recorded) == (1, 3)


def test_memory_is_bounded_in_tokens_and_the_oldest_go_first(sample_store: SampleStore) -> None:
    for number in range(300):
        sample_store.record(request_of((number, 8)), [completion_of((1, 2))])
    assert sample_store.num_tokens <= 1000
    assert sample_store.num_completions == 250
    assert find(sample_store, (0, 8), (1, 2)) is None
    assert find(sample_store, (299, 8), (1, 2)) is not None


def test_one_prompt_that_is_asked_for_ever_stays_bounded(sample_store: SampleStore) -> None:
    for _ in range(1000):
        sample_store.record(request_of(PROMPT), [completion_of((1, 2))])
    assert sample_store.num_completions == 250


def test_a_sequence_without_trained_tokens_needs_no_completion(sample_store: SampleStore) -> None:
    assert find(sample_store, PROMPT) is not None


def test_prompts_longer_than_the_table_of_factors_are_told_apart(clock: Clock) -> None:
    sample_store = SampleStore(atropos_settings(), clock)
    long = tuple(range(70_000))
    sample_store.record(request_of(long), [completion_of((1,))])
    assert find(sample_store, long, (1,)) is not None
    assert find(sample_store, (*long[:69_999], 5), (1,)) is None
