"""Completions that several workers encode: rank 0 writes what one process would have written."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from parallm.distributed import rollouts as module
from parallm.distributed.rollouts import RolloutJoiner, RolloutPosts
from parallm.distributed.wire import pack_rows, unpack_rows
from parallm.metrics.rollout_format import LEARNED, LearnedCompletion, StepRollouts, decode, encode, encode_rows
from parallm.metrics.rollout_writer import MAX_WAITING
from parallm.metrics.token_texts import CutText
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


def post(together: Together, rank: int) -> None:
    """Let a rank write its part of the step."""
    write(RolloutPosts(together.rank(rank), cut, lambda: False), of_rank(rank))


def write(writer: RolloutPosts, rollouts: StepRollouts) -> None:
    writer.put(rollouts)
    writer.close()


def joined(together: Together) -> bytes:
    return RolloutJoiner(together.rank(0), cut).encode(of_rank(0), nothing)


def fails(*_: object) -> list[CutText]:
    raise RuntimeError("no text")


def test_the_file_is_that_of_one_process_bit_for_bit(caplog: pytest.LogCaptureFixture) -> None:
    together = Together(SIZE, exact=False)
    for rank in (2, 1):
        post(together, rank)
    assert joined(together) == WHOLE
    assert not caplog.records


def test_no_completion_is_encoded_twice() -> None:
    encoded: list[int] = []

    def counted(rows: Sequence[np.ndarray], _: object) -> list[CutText]:
        encoded.append(len(rows))
        return cut(rows)

    together = Together(SIZE, exact=False)
    for rank in (1, 2):
        write(RolloutPosts(together.rank(rank), counted, lambda: False), of_rank(rank))
    RolloutJoiner(together.rank(0), counted).encode(of_rank(0), nothing)
    assert sum(encoded) == len(STEP.indices)
    assert min(encoded[:SIZE]) > 1
    assert encoded[SIZE:] == [0]


@pytest.mark.parametrize("why", ["silent", "ended", "dropped", "failed"])
def test_what_does_not_come_is_written_without_the_numbers_of_the_learner(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    together = Together(SIZE, exact=False)
    if why == "silent":
        monkeypatch.setattr(module, "POST_SECONDS", 0.05)
    elif why == "ended":
        together.posts.put((2, None))
    elif why == "dropped":
        RolloutPosts(together.rank(2), cut, lambda: False)._drop(STEP.step)
    else:
        write(RolloutPosts(together.rank(2), fails, lambda: False), of_rank(2))
    post(together, 1)  # behind the end of the other
    caplog.clear()
    began = time.monotonic()
    file, whole = decode(joined(together)), decode(WHOLE)
    assert time.monotonic() - began < 5
    (record,) = caplog.records
    assert "step 7: 2 completions of rank 2 did not come" in record.getMessage()
    for index in STEP.indices:
        found, expected = file.tokens(*index), whole.tokens(*index)
        assert found.texts == expected.texts
        assert found.logprobs_T.tolist() == expected.logprobs_T.tolist()
        has_numbers = bool((found.flags_T & LEARNED).any())
        assert has_numbers is (index in TRAINED and index not in of_rank(2).learned)


def test_a_worker_ahead_is_waited_for_and_late_posts_are_forgotten() -> None:
    together = Together(2, exact=False)
    joining = RolloutJoiner(together.rank(0), cut)
    other = together.rank(1)
    rows = encode_rows(of_rank(1), list(of_rank(1).learned), cut, nothing)
    for step in (6, 8, 7):
        other.post(pack_rows(step, rows))
    joining.encode(of_rank(0), nothing)
    assert together.posts.empty()
    assert list(joining._posts) == [8]
    joining.encode(of_rank(0, step=8), nothing)
    assert not joining._posts


def test_posts_do_not_pile_up_where_rank_0_encodes_nothing() -> None:
    together = Together(2, exact=False)
    joining = RolloutJoiner(together.rank(0), fails)
    for step in range(20):
        together.rank(1).post(pack_rows(step, {}))
        with pytest.raises(RuntimeError, match="no text"):
            joining.encode(of_rank(0, step=step), nothing)
    assert together.posts.qsize() + len(joining._posts) <= 2


def test_the_writer_of_a_worker_posts_each_step_and_tells_of_those_beyond_the_limit() -> None:
    together = Together(2, exact=False)
    may_go_on = threading.Event()

    def slow(rows: Sequence[np.ndarray], _: object) -> list[CutText]:
        may_go_on.wait(60)
        return cut(rows)

    writer = RolloutPosts(together.rank(1), slow, lambda: False)
    for step in range(MAX_WAITING + 2):
        writer.put(of_rank(1, step=step))
    may_go_on.set()
    writer.close()
    posts = [unpack_rows(together.posts.get_nowait()[1] or b"") for _ in range(MAX_WAITING + 2)]
    assert {step: rows is not None for step, rows in posts} == {
        step: step < MAX_WAITING for step in range(MAX_WAITING + 2)
    }
    assert writer.num_dropped == 2
    assert writer.reading is None


def test_rows_come_back_equal() -> None:
    odd = [
        group(),
        group(trajectory((1, 2), 1.0, text='"\n\u2028\ud800é'), trajectory((), 0.0), trajectory((3,), float("nan"))),
        group(trajectory((4, 5), 0.5)),
    ]
    one = LearnedCompletion(
        group=0,
        index=0,
        advantages_T=np.full(2, 0.1, np.float32),
        logprobs_T=np.array([np.nan, -0.1], np.float32),
        entropies_T=np.array([0.1, 70000.0], np.float32),
        clipped_T=np.array([True, False]),
    )
    step = StepRollouts(step=3, time=1.0, groups=odd, trained={(2, 0)}, learned={(2, 0): one})
    together = Together(2, exact=False)
    write(RolloutPosts(together.rank(1), cut, lambda: False), step)
    assert RolloutJoiner(together.rank(0), cut).encode(replace(step, learned={}), nothing) == encode(step, cut)
    assert unpack_rows(pack_rows(3, {})) == (3, {})
    assert unpack_rows(pack_rows(3, None)) == (3, None)
