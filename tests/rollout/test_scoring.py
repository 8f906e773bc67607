import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parallm.errors import EnvironmentFailed
from parallm.rollout.collector import Collector, RolloutBatch
from parallm.rollout.problems import ProblemStream
from parallm.rollout.scoring import REWARD_MODEL, FaultLog, Score, raise_if_none_scored
from parallm.rollout.settings import RolloutSettings
from parallm.types import Completion, FaultyEpisode, GenerationRequest, Message, Problem, Split
from tests.rollout.answers import one_by_one

PROBLEMS = [
    Problem(problem_id=f"p{place}", messages=(Message(role="user", content="?"),), answer="") for place in range(2)
]


class Scoring:
    """Scores a completion, whose text is its index, with what the given function says."""

    weights: Mapping[str, float] = {"right": 2.0, "huge": 1e10}

    def __init__(self, answer: Callable[[int], object]) -> None:
        self._answer = answer

    def problems(self, split: Split) -> Sequence[Problem]:
        return PROBLEMS

    def score(self, problem: Problem, text: str) -> Any:
        return self._answer(int(text))


def collect(engine: Any, answer: Callable[[int], object], **values: Any) -> RolloutBatch:
    class Letters:
        def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
            return (5,)

    settings = RolloutSettings(**{"problems_per_step": 2, "group_size": 4, "refill_rounds": 0} | values)
    generate, stream = one_by_one(engine.generate_all), ProblemStream(PROBLEMS, 0)
    # the fake has just the method that is used
    collector = Collector(generate, Letters(), Scoring(answer), stream, settings, 0)  # type: ignore[arg-type]
    return asyncio.run(collector.collect(2, "policy"))


@pytest.mark.parametrize(
    ("wrong", "kind", "detail"),
    [
        ({"right": math.nan}, "score_not_finite", "the part 'right' is nan"),
        ({"seen": -math.inf, "right": 1}, "score_not_finite", "the part 'seen' is -inf"),
        ({"huge": 1e300}, "score_too_large", "the part 'huge' is 1e+300; the limit is 1e+09 either way"),
        ({"huge": -1e9}, "score_too_large", "the parts {'huge': -1000000000.0} add up to -1e+19; the limit"),
        ({"right": "1"}, "score_malformed", "the part 'right' is '1', not a number"),
        ({"right": np.ones(2)}, "score_malformed", "the part 'right' is array([1., 1.]), not a number"),
        ({"right": 10**400}, "score_malformed", "the part 'right' is 1000"),
        (1.0, "score_malformed", "score returned 1.0, not a mapping of names to numbers"),
        (None, "score_malformed", "score returned None, not a mapping"),
    ],
)
def test_a_completion_without_a_finite_reward_is_left_out_of_its_group(
    engine: Any, wrong: object, kind: str, detail: str
) -> None:
    collection = collect(engine, lambda index: wrong if index == 1 else {"right": index == 2})
    assert [group.rewards for group in collection.sampled] == [(0.0, 2.0, 0.0)] * 2
    assert [one.text for one in collection.sampled[0].trajectories] == ["0", "2", "3"]
    assert collection.faults == {kind: 2}
    (fault,) = collection.sampled[0].faulty
    assert (fault.text, fault.tokens) == ("1", (7, 1))
    assert fault.detail.startswith(detail)
    assert collection.num_tokens == 16


def test_numbers_of_numpy_and_truth_values_are_parts(engine: Any) -> None:
    collection = collect(engine, lambda index: {"right": np.float32(index), "seen": index > 1})
    assert collection.sampled[0].rewards == (0.0, 2.0, 4.0, 6.0)
    assert collection.sampled[0].trajectories[2].reward_parts == {"right": 2.0, "seen": 1.0}


def test_a_score_may_be_async(engine: Any) -> None:
    async def judged(index: int) -> Mapping[str, float]:
        await asyncio.sleep(0.01)
        return {"right": index / 0} if index == 3 else {"right": index}

    collection = collect(engine, judged)
    assert collection.sampled[1].rewards == (0.0, 2.0, 4.0)
    assert collection.faults == {"score_raised": 2}


def test_a_group_without_any_reward_has_no_signal_and_no_trajectories(engine: Any) -> None:
    collection = collect(engine, lambda index: None)
    assert [group.trajectories for group in collection.sampled] == [(), ()]
    assert collection.with_signal == ()
    assert collection.faults == {"score_malformed": 8}


def test_completions_without_tokens_are_left_out(engine: Any) -> None:
    async def generate_all(requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        rows = await engine.generate_all(requests)
        return [[replace(row[0], tokens=(), logprobs=(), weight_versions=()), *row[1:]] for row in rows]

    collection = collect(SimpleNamespace(generate_all=generate_all), lambda index: {"right": index})
    assert collection.sampled[0].rewards == (2.0, 4.0, 6.0)
    assert collection.faults == {"no_tokens": 2}


def test_a_score_over_its_time_is_a_fault(engine: Any) -> None:
    def hang(index: int) -> Mapping[str, float]:
        while index == 2:
            pass
        return {"right": index}

    collection = collect(engine, hang, score_seconds=0.2)
    assert collection.sampled[0].rewards == (0.0, 2.0, 6.0)
    assert collection.faults == {"score_timed_out": 2}


def test_faults_are_named_in_the_log_with_their_texts(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    collect(engine, lambda index: {"right": 1 / index})
    *lines, last = caplog.messages
    assert sorted(lines) == [
        f"step 3, score_raised: ZeroDivisionError('division by zero'); problem {name}, text '0'"
        for name in ("p0", "p1")
    ]
    assert last.startswith(
        "step 3, score_raised, where it was raised first:\nTraceback (most recent call last):\n  File"
    )
    assert f'File "{__file__}", line ' in last


def test_many_faults_of_a_kind_and_long_texts_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    fault = FaultyEpisode(kind="score_raised", detail="ValueError()", text="x" * 5000, tokens=())
    FaultLog().log("step 4", [(PROBLEMS[0], fault)] * 10)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    assert lines[-1] == "step 4, score_raised: 7 more completions"
    assert lines[0].endswith("x ...'")
    assert len(lines[0]) < 2100


def test_a_traceback_is_logged_once_for_each_place_whatever_its_message_is(caplog: pytest.LogCaptureFixture) -> None:
    def raised(line: int, message: str) -> FaultyEpisode:
        frame = f'  File "own.py", line {line}, in score\n    1 / 0'
        text = f"Traceback (most recent call last):\n{frame}\nValueError: {message}"
        return FaultyEpisode(kind="score_raised", detail=message, text="", tokens=(), traceback=text)

    log = FaultLog()
    for when in ("step 1", "step 2"):
        log.log(when, [(PROBLEMS[0], raised(7, "a")), (PROBLEMS[0], raised(7, "b")), (PROBLEMS[0], raised(9, "a"))])
    locations = [line.splitlines()[2] for line in caplog.messages if "where it was raised first" in line]
    assert locations == ['  File "own.py", line 7, in score', '  File "own.py", line 9, in score']


def test_nothing_to_tell_right_from_wrong_is_not_right() -> None:
    assert not Score(parts={}, reward=0.0).is_correct
    assert not Score(parts={REWARD_MODEL: 1.0}, reward=1.0).is_correct
    assert Score(parts={REWARD_MODEL: -3.0, "exact": 1.0}, reward=1.0).is_correct


def test_an_environment_that_has_scored_nothing_is_refused_with_its_traceback() -> None:
    plain = FaultyEpisode(kind="score_malformed", detail="score returned 1.0", text="", tokens=())
    raised = replace(plain, kind="score_raised", detail="ValueError()", traceback="Traceback\n  File x")
    silent = replace(plain, kind="no_tokens", detail="nothing")
    with pytest.raises(EnvironmentFailed) as failed:
        raise_if_none_scored("step 1", [silent, plain, raised, raised], 0)
    assert str(failed.value) == (
        "step 1: not one of 3 completions could be scored ({'score_malformed': 1, 'score_raised': 2}); correct the "
        "environment. The first: Traceback\n  File x"
    )
    raise_if_none_scored("step 1", [raised], 1)
    raise_if_none_scored("step 1", [silent], 0)
    raise_if_none_scored("step 1", [], 0)


def test_where_nothing_can_be_scored_no_more_is_sampled(engine: Any) -> None:
    collection = collect(engine, lambda index: None, refill_rounds=3)
    assert len(collection.sampled) == 2
    assert len(collect(engine, lambda index: {"right": 1}, refill_rounds=3).sampled) == 8
