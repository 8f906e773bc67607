import threading

import mlx.core as mx
import pytest

from parallm.learner.learner import GraphBuilder


@pytest.fixture
def builder() -> GraphBuilder:
    return GraphBuilder(mx.default_stream(mx.default_device()))


def test_building_and_handing_over_happen_at_the_same_time(builder: GraphBuilder) -> None:
    both = threading.Barrier(2, timeout=10)

    def build() -> str:
        both.wait()
        return threading.current_thread().name

    assert builder.build_during(build, both.wait).startswith("builder")


def test_what_is_built_belongs_to_the_stream_of_who_asked(builder: GraphBuilder) -> None:
    x = mx.arange(4.0)

    def build() -> tuple[mx.Stream, mx.array]:
        gradient: mx.array = mx.grad(lambda values: mx.square(values).sum())(x)
        return mx.default_stream(mx.default_device()), gradient

    stream, gradient = builder.build_during(build, lambda: mx.async_eval(x))
    assert stream == mx.default_stream(mx.default_device())
    assert gradient.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_an_error_of_either_side_comes_when_both_have_ended(builder: GraphBuilder) -> None:
    ended = threading.Event()

    def fail() -> None:
        raise ValueError("out of memory")

    with pytest.raises(ValueError, match="out of memory"):
        builder.build_during(ended.set, fail)
    assert ended.is_set()
    ended.clear()
    with pytest.raises(ValueError, match="out of memory"):
        builder.build_during(fail, ended.set)
    assert ended.is_set()
