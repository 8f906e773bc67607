import time

from parallm.rollout.problem_stream import ProblemStream
from parallm.types import Message, Problem


def stream_of(count: int, seed: int = 0) -> ProblemStream:
    problems = [
        Problem(problem_id=str(place), messages=(Message(role="user", content="?"),), answer="")
        for place in range(count)
    ]
    return ProblemStream(problems, seed)


def names(stream: ProblemStream, count: int) -> list[str]:
    return [problem.problem_id for problem in stream.take(count)]


def test_each_epoch_has_every_problem_once_in_an_order_of_its_own() -> None:
    stream = stream_of(20)
    epochs = [names(stream, 20) for _ in range(3)]
    assert all(sorted(epoch, key=int) == [str(place) for place in range(20)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_follows_from_the_seed() -> None:
    assert names(stream_of(20, seed=1), 50) == names(stream_of(20, seed=1), 50)
    assert names(stream_of(20, seed=1), 20) != names(stream_of(20, seed=2), 20)


def test_the_size_of_the_takes_does_not_change_the_order() -> None:
    in_parts = stream_of(7)
    assert names(in_parts, 5) + names(in_parts, 1) + names(in_parts, 12) == names(stream_of(7), 18)


def test_a_stream_goes_on_from_a_saved_cursor_in_any_epoch() -> None:
    whole, resumed = stream_of(6), stream_of(6)
    before = names(whole, 15)
    resumed.cursor = whole.cursor
    assert before + names(resumed, 9) == names(stream_of(6), 24)


def test_the_cursor_may_go_back_to_an_earlier_epoch() -> None:
    stream = stream_of(6)
    first = names(stream, 6)
    names(stream, 6)
    stream.cursor = 0
    assert names(stream, 6) == first


def test_a_problem_of_a_large_split_costs_no_time() -> None:
    stream = stream_of(50_000)
    stream.take(1)
    began = time.perf_counter()
    stream.take(200)
    assert time.perf_counter() - began < 1.0  # the event loop waits meanwhile: one shuffle per epoch, not per problem
