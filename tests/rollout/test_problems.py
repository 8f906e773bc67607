import time

import pytest

from parallm.environment.environment import Mixed
from parallm.environment.settings import ArithmeticSettings, MixedPart, MixedSettings
from parallm.errors import ConfigError, ProblemError
from parallm.rollout.problems import ProblemStream, Stream, make_stream
from parallm.run.training_data import build_environment
from parallm.types import Message, Problem


def stream_of(count: int, seed: int = 0) -> ProblemStream:
    problems = [
        Problem(problem_id=str(place), messages=(Message(role="user", content="?"),), answer="")
        for place in range(count)
    ]
    return ProblemStream(problems, seed)


def take(stream: Stream, count: int, start: int = 0) -> list[Problem]:
    return [stream.at(index) for index in range(start, start + count)]


def names(stream: Stream, count: int, start: int = 0) -> list[str]:
    return [problem.problem_id for problem in take(stream, count, start)]


def test_each_epoch_has_every_problem_once_in_an_order_of_its_own() -> None:
    stream = stream_of(20)
    epochs = [names(stream, 20, start) for start in (0, 20, 40)]
    assert all(sorted(epoch, key=int) == [str(place) for place in range(20)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_follows_from_the_seed() -> None:
    assert names(stream_of(20, seed=1), 50) == names(stream_of(20, seed=1), 50)
    assert names(stream_of(20, seed=1), 20) != names(stream_of(20, seed=2), 20)


def test_an_index_means_the_same_problem_whatever_was_drawn_before() -> None:
    whole = names(stream_of(6), 24)
    assert names(stream_of(6), 9, start=15) == whole[15:]
    stream = stream_of(6)
    assert (names(stream, 6, start=18), names(stream, 6)) == (whole[18:], whole[:6])


def test_a_problem_of_a_large_split_costs_no_time() -> None:
    stream = stream_of(50_000)
    stream.at(0)
    began = time.perf_counter()
    take(stream, 200)
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
    for start in range(0, 70 * 16, 16):
        names = [problem.environment for problem in take(stream, 16, start)]
        assert (names.count("a"), names.count("b")) == (12, 4)


def test_each_environment_of_a_mixture_goes_through_epochs_of_its_own() -> None:
    drawn = take(mixed_stream(a=3, b=1), 320)
    for name, epochs in (("a", 6), ("b", 2)):
        own = [problem.problem_id for problem in drawn if problem.environment == name]
        assert len(own) == 40 * epochs
        assert all(len(set(own[start : start + 40])) == 40 for start in range(0, len(own), 40))


def test_an_index_of_a_mixture_means_the_same_problem_whatever_was_drawn_before() -> None:
    whole = take(mixed_stream(a=2, b=1, c=0.7), 2395)
    assert take(mixed_stream(a=2, b=1, c=0.7), 50, start=2345) == whole[2345:]


def test_the_order_of_a_mixture_follows_from_the_seed() -> None:
    assert take(mixed_stream(1, a=1, b=1), 90) == take(mixed_stream(1, a=1, b=1), 90)
    assert take(mixed_stream(1, a=1, b=1), 90) != take(mixed_stream(2, a=1, b=1), 90)


def test_a_part_that_would_never_be_drawn_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment\.parts\.b\.weight is less than one draw in 1000"):
        mixed_stream(a=5000, b=1)


def test_a_part_without_problems_is_refused() -> None:
    environment = mixture(a=1, b=1)
    problems = [problem for problem in environment.problems("train") if problem.environment == "a"]
    with pytest.raises(ProblemError, match=r"environment\.parts\.b: the train split has no problems"):
        make_stream(environment, problems, 0)
