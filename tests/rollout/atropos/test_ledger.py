"""Which completion a posted token is from: by exact tokens, and never by guessing."""

from dataclasses import dataclass

import numpy as np
import pytest

from parallm.rollout.atropos.ledger import Behaviour, SampledLedger
from parallm.types import WeightSpan
from tests.rollout.atropos.conftest import atropos_settings, completion_of, request_of

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
def ledger(clock: Clock) -> SampledLedger:
    return SampledLedger(atropos_settings(ledger_tokens=1000, ledger_seconds=60), clock)


def find(
    ledger: SampledLedger, prompt: tuple[int, ...], *turns: tuple[int, ...], logprobs: list[float] | None = None
) -> Behaviour | None:
    """A sequence of a prompt, a trained turn, a masked turn, a trained turn and so on."""
    tokens = [*prompt, *(token for turn in turns for token in turn)]
    trained = [False] * len(prompt)
    for place, turn in enumerate(turns):
        trained += [place % 2 == 0] * len(turn)
    told = None if logprobs is None else np.array([1.0] * len(prompt) + logprobs, np.float32)
    return ledger.find(np.array(tokens, np.int32), np.array(trained), told)


def test_versions_log_probs_and_temperature_are_those_of_the_completion(ledger: SampledLedger) -> None:
    made = completion_of((1, 2, 3), logprobs=(-0.1, -0.2, -0.3))
    switched = (WeightSpan(version=4, start=0, end=2), WeightSpan(version=5, start=2, end=3))
    object.__setattr__(made, "weight_versions", switched)
    ledger.witness(request_of(PROMPT, temperature=0.7), [made])
    found = find(ledger, PROMPT, (1, 2, 3))
    assert found is not None
    np.testing.assert_array_equal(found.logprobs_T[2:], np.array([-0.1, -0.2, -0.3], np.float32))
    assert found.versions_T[2:].tolist() == [4, 4, 5]
    assert (found.temperature, found.is_filtered, found.finish_reason) == (0.7, False, "stop")


@pytest.mark.parametrize("tokens", [(1, 2, 4), (2, 1, 3), (1, 2, 3, 4), (9, 1, 2, 3)])
def test_other_tokens_are_not_found(ledger: SampledLedger, tokens: tuple[int, ...]) -> None:
    ledger.witness(request_of(PROMPT), [completion_of((1, 2, 3))])
    assert find(ledger, PROMPT, tokens) is None


def test_the_same_tokens_behind_another_prompt_are_not_found(ledger: SampledLedger) -> None:
    ledger.witness(request_of(PROMPT), [completion_of((1, 2, 3))])
    assert find(ledger, (8, 7), (1, 2, 3)) is None
    assert find(ledger, (7, 8, 9), (1, 2, 3)) is None
    assert find(ledger, (7,), (1, 2, 3)) is None


def test_the_beginning_of_a_completion_is_found(ledger: SampledLedger) -> None:
    ledger.witness(request_of(PROMPT), [completion_of((1, 2, 3), logprobs=(-0.1, -0.2, -0.3))])
    found = find(ledger, PROMPT, (1, 2))
    assert found is not None
    np.testing.assert_array_equal(found.logprobs_T[2:], np.array([-0.1, -0.2], np.float32))


def test_turns_are_completions_of_all_before_them(ledger: SampledLedger) -> None:
    ledger.witness(request_of(PROMPT), [completion_of((1, 2), version=1)])
    ledger.witness(request_of((*PROMPT, 1, 2, 30, 31)), [completion_of((3, 4), version=2)])
    found = find(ledger, PROMPT, (1, 2), (30, 31), (3, 4))
    assert found is not None
    assert found.versions_T.tolist() == [0, 0, 1, 1, 0, 0, 2, 2]


def test_a_turn_that_was_not_sampled_here_makes_the_whole_sequence_unknown(ledger: SampledLedger) -> None:
    ledger.witness(request_of(PROMPT), [completion_of((1, 2))])
    assert find(ledger, PROMPT, (1, 2), (30, 31), (3, 4)) is None


def test_a_completion_that_goes_on_where_one_was_cut_is_the_one_that_counts(ledger: SampledLedger) -> None:
    ledger.witness(request_of(PROMPT), [completion_of((1, 2, 3, 9), version=1)])
    ledger.witness(request_of((*PROMPT, 1, 2)), [completion_of((3, 4), version=2)])
    found = find(ledger, PROMPT, (1, 2, 3, 4))
    assert found is not None
    assert found.versions_T[2:].tolist() == [1, 1, 2, 2]


def test_a_later_turn_with_the_first_one_masked_is_found(ledger: SampledLedger) -> None:
    ledger.witness(request_of((*PROMPT, 1, 2, 30)), [completion_of((3, 4), version=2)])
    assert find(ledger, (*PROMPT, 1, 2, 30), (3, 4)) is not None


def test_turns_at_different_temperatures_have_none(ledger: SampledLedger) -> None:
    ledger.witness(request_of(PROMPT, temperature=0.5), [completion_of((1,))])
    ledger.witness(request_of((*PROMPT, 1, 30), temperature=1.0), [completion_of((2,))])
    found = find(ledger, PROMPT, (1,), (30,), (2,))
    assert found is not None
    assert np.isnan(found.temperature)


def test_of_equal_completions_the_posted_log_probs_tell_which(ledger: SampledLedger) -> None:
    for version, logprob in ((1, -0.5), (2, -0.6), (3, -0.7)):
        ledger.witness(request_of(PROMPT), [completion_of((1, 2), version=version, logprobs=(logprob, logprob))])
    found = find(ledger, PROMPT, (1, 2), logprobs=[-0.6, -0.6])
    assert found is not None
    assert found.versions_T[2:].tolist() == [2, 2]


def test_of_equal_completions_without_log_probs_each_is_taken_in_turn(ledger: SampledLedger) -> None:
    for version in (1, 2):
        ledger.witness(request_of(PROMPT), [completion_of((1, 2), version=version)])
    found = [find(ledger, PROMPT, (1, 2)) for _ in range(2)]
    assert [int(one.versions_T[-1]) for one in found if one is not None] == [1, 2]


def test_the_longest_of_several_beginnings_counts(ledger: SampledLedger) -> None:
    ledger.witness(request_of(PROMPT), [completion_of((1,), version=1), completion_of((1, 2, 3), version=2)])
    found = find(ledger, PROMPT, (1, 2, 3))
    assert found is not None
    assert found.versions_T[2:].tolist() == [2, 2, 2]


def test_a_filtered_sample_is_known_as_one(ledger: SampledLedger) -> None:
    ledger.witness(request_of(PROMPT, top_p=0.9), [completion_of((1,))])
    found = find(ledger, PROMPT, (1,))
    assert found is not None
    assert found.is_filtered


def test_evaluations_and_probes_leave_by_age(ledger: SampledLedger, clock: Clock) -> None:
    ledger.witness(request_of(PROMPT), [completion_of((1, 2)), completion_of((3,))])
    assert find(ledger, PROMPT, (1, 2)) is not None
    clock.now += 61
    ledger.witness(request_of((9, 9)), [completion_of((1,))])
    assert find(ledger, PROMPT, (1, 2)) is None
    assert (ledger.num_completions, ledger.num_expired, ledger.num_witnessed) == (1, 1, 3)


def test_memory_is_bounded_in_tokens_and_the_oldest_go_first(ledger: SampledLedger) -> None:
    for number in range(300):
        ledger.witness(request_of((number, 8)), [completion_of((1, 2))])
    assert ledger.num_tokens <= 1000
    assert ledger.num_completions == 250
    assert find(ledger, (0, 8), (1, 2)) is None
    assert find(ledger, (299, 8), (1, 2)) is not None


def test_one_prompt_that_is_asked_for_ever_stays_bounded(ledger: SampledLedger) -> None:
    for _ in range(1000):
        ledger.witness(request_of(PROMPT), [completion_of((1, 2))])
    assert ledger.num_completions == 250


def test_a_sequence_without_trained_tokens_needs_no_completion(ledger: SampledLedger) -> None:
    assert find(ledger, PROMPT) is not None


def test_prompts_longer_than_the_table_of_factors_are_told_apart(clock: Clock) -> None:
    ledger = SampledLedger(atropos_settings(), clock)
    long = tuple(range(70_000))
    ledger.witness(request_of(long), [completion_of((1,))])
    assert find(ledger, long, (1,)) is not None
    assert find(ledger, (*long[:69_999], 5), (1,)) is None
