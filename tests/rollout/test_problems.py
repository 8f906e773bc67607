import time

import pytest

from parallm.environment.environment import Mixed
from parallm.environment.settings import ArithmeticSettings, MixedPart, MixedSettings
from parallm.errors import ConfigError, ProblemError
from parallm.rollout.problems import ProblemStream, Stream, make_stream
from parallm.run.environments import build_environment
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


def mixture(**shares: float) -> Mixed:
    parts = {
        name: MixedPart(weight=share, environment=ArithmeticSettings(num_train=40, num_test=4))
        for name, share in shares.items()
    }
    made = build_environment(MixedSettings(parts=parts))
    assert isinstance(made, Mixed)
    return made


def mixed_stream(seed: int = 0, **shares: float) -> Stream:
    environment = mixture(**shares)
    return make_stream(environment, environment.problems("train"), seed)


def test_environments_are_drawn_by_their_weights_in_every_stretch() -> None:
    stream = mixed_stream(a=3, b=1)
    for _ in range(70):
        names = [problem.environment for problem in stream.take(16)]
        assert (names.count("a"), names.count("b")) == (12, 4)


def test_each_environment_of_a_mixture_goes_through_epochs_of_its_own() -> None:
    drawn = mixed_stream(a=3, b=1).take(320)
    for name, epochs in (("a", 6), ("b", 2)):
        own = [problem.problem_id for problem in drawn if problem.environment == name]
        assert len(own) == 40 * epochs
        assert all(len(set(own[start : start + 40])) == 40 for start in range(0, len(own), 40))


def test_a_mixture_goes_on_from_a_saved_cursor() -> None:
    whole = mixed_stream(a=2, b=1, c=0.7)
    whole.take(2345)
    resumed = mixed_stream(a=2, b=1, c=0.7)
    resumed.cursor = whole.cursor
    assert resumed.cursor == 2345
    assert resumed.take(50) == whole.take(50)


def test_the_order_of_a_mixture_follows_from_the_seed() -> None:
    assert mixed_stream(1, a=1, b=1).take(90) == mixed_stream(1, a=1, b=1).take(90)
    assert mixed_stream(1, a=1, b=1).take(90) != mixed_stream(2, a=1, b=1).take(90)


def test_a_part_that_would_never_be_drawn_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment\.parts\.b\.weight is less than one draw in 1000"):
        mixed_stream(a=5000, b=1)


def test_a_part_without_problems_is_refused() -> None:
    environment = mixture(a=1, b=1)
    problems = [problem for problem in environment.problems("train") if problem.environment == "a"]
    with pytest.raises(ProblemError, match=r"environment\.parts\.b: the train split has no problems"):
        make_stream(environment, problems, 0)
