"""Completions that several workers encode: rank 0 writes what one process would have written."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from parallm.distributed import rollouts as module
from parallm.distributed.rollouts import Joining, RolloutPosts, post_own
from parallm.distributed.wire import pack_rows, unpack_rows
from parallm.metrics.rollout_format import LEARNED, LearnedCompletion, StepRollouts, decode, encode, encode_rows
from parallm.metrics.rollout_writer import MAX_WAITING
from tests.distributed.conftest import Together
from tests.metrics.test_rollout_format import cut, group, learned, trajectory

SIZE = 3
GROUPS = [
    group(*(trajectory(tuple(range(length)), float(length)) for length in (3, 1, 9)), number=number)
    for number in range(4)
]
TRAINED = {
    (place, index): learned(one, index) for place in (0, 2) for index, one in enumerate(GROUPS[place].trajectories)
}


def nothing() -> None: ...


def of_rank(rank: int, **changes: object) -> StepRollouts:
    """The step as this rank has it: it has computed every third completion that was trained on."""
    own = {place: one for number, (place, one) in enumerate(TRAINED.items()) if number % SIZE == rank}
    return replace(STEP, learned=own, **changes)  # type: ignore[arg-type]


STEP = StepRollouts(step=7, time=5.0, groups=GROUPS, trained=TRAINED.keys(), learned=TRAINED)
WHOLE = encode(STEP, cut)


def posted(together: Together, ranks: Sequence[int], **changes: object) -> None:
    for rank in ranks:
        post_own(together.rank(rank), of_rank(rank, **changes), cut, nothing)


def test_the_file_is_that_of_one_process_bit_for_bit() -> None:
    together = Together(SIZE, exact=False)
    posted(together, (2, 1))
    assert together.posts.qsize() == 2
    assert Joining(together.rank(0), cut).encode(of_rank(0), nothing) == WHOLE


def test_no_completion_is_encoded_twice() -> None:
    encoded: list[int] = []

    def counted(rows: Sequence[np.ndarray], throttle: object) -> object:
        encoded.append(len(rows))
        return cut(rows)

    together = Together(SIZE, exact=False)
    for rank in (1, 2):
        post_own(together.rank(rank), of_rank(rank), counted, nothing)  # type: ignore[arg-type]
    Joining(together.rank(0), counted).encode(of_rank(0), nothing)  # type: ignore[arg-type]
    assert sum(encoded) == len(STEP.places)
    assert min(encoded[:SIZE]) > 1
    assert encoded[SIZE:] == [0]


def test_what_does_not_come_is_written_without_the_numbers_of_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POST_SECONDS", 0.05)
    together = Together(SIZE, exact=False)
    posted(together, (1,))
    file, whole = decode(Joining(together.rank(0), cut).encode(of_rank(0), nothing)), decode(WHOLE)
    for place in STEP.places:
        found, expected = file.tokens(*place), whole.tokens(*place)
        assert found.texts == expected.texts
        assert found.logprobs_T.tolist() == expected.logprobs_T.tolist()
        is_lost = place in of_rank(2).learned
        assert (found.flags_T.tolist() == expected.flags_T.tolist()) is not is_lost
        assert not (is_lost and (found.flags_T & LEARNED).any())


def test_a_worker_that_has_dropped_a_step_keeps_nobody_waiting() -> None:
    together = Together(SIZE, exact=False)
    posted(together, (1,))
    RolloutPosts(together.rank(2), cut, lambda: False)._drop(STEP.step)
    assert decode(Joining(together.rank(0), cut).encode(of_rank(0), nothing)).summary["completions"] == len(STEP.places)


def test_a_worker_ahead_is_waited_for_and_a_step_that_rank_0_has_dropped_is_forgotten() -> None:
    together = Together(2, exact=False)
    joining = Joining(together.rank(0), cut)
    other = together.rank(1)
    rows = encode_rows(of_rank(1), list(of_rank(1).learned), cut, nothing)
    for step in (6, 8, 7):
        other.post(pack_rows(step, rows))
    joining.encode(of_rank(0), nothing)
    assert together.posts.empty()
    assert list(joining._posts) == [8]
    joining.encode(of_rank(0, step=8), nothing)
    assert not joining._posts


def test_the_writer_of_a_worker_posts_each_step_and_drops_those_beyond_the_limit() -> None:
    together = Together(2, exact=False)
    may_go_on = threading.Event()

    def slow(rows: Sequence[np.ndarray], _: object) -> object:
        may_go_on.wait(60)
        return cut(rows)

    writer = RolloutPosts(together.rank(1), slow, lambda: False)  # type: ignore[arg-type]
    for step in range(MAX_WAITING + 2):
        writer.put(of_rank(1, step=step))
    may_go_on.set()
    writer.close()
    posts = [unpack_rows(together.posts.get_nowait()[1]) for _ in range(MAX_WAITING + 2)]
    assert {step: bool(rows) for step, rows in posts} == {step: step < MAX_WAITING for step in range(MAX_WAITING + 2)}
    assert writer.num_dropped == 2
    assert writer.reading is None


def test_rows_come_back_equal() -> None:
    odd = [
        group(trajectory((1, 2), 1.0, text='"\n\u2028\ud800é'), trajectory((), 0.0), trajectory((3,), float("nan"))),
        group(),
    ]
    one = LearnedCompletion(
        group=0,
        index=0,
        advantages_T=np.full(2, 0.1, np.float32),
        logprobs_T=np.array([np.nan, -0.1], np.float32),
        entropies_T=np.array([0.1, 70000.0], np.float32),
        clipped_T=np.array([True, False]),
    )
    step = StepRollouts(step=3, time=1.0, groups=odd, trained={(0, 0)}, learned={(0, 0): one})
    together = Together(1, exact=False)
    assert Joining(together.rank(0), cut).encode(step, nothing) == encode(step, cut)
    assert unpack_rows(pack_rows(3, {})) == (3, {})
