"""A tokenizer, an environment and an engine that are small enough to follow by eye."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from parallm.rollout.collector import Collector
from parallm.rollout.problems import ProblemStream
from parallm.rollout.settings import RolloutSettings
from parallm.types import Completion, GenerationRequest, Message, Problem, Split, WeightSpan
from tests.rollout.answers import one_by_one


class Letters:
    """One token per letter of the messages."""

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(ord(letter) for message in messages for letter in message.content)


class Hardness:
    """The reward of a completion is 1 for the first `answer` of a problem's completions, whose text is their index."""

    weights: Mapping[str, float] = {"correct": 0.75, "format": 0.25}

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._problems = problems

    def problems(self, split: Split) -> Sequence[Problem]:
        return self._problems

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        return {"correct": float(int(text) < int(problem.answer)), "format": 1.0, "seen": 5.0}


class Recorder:
    """Answers every request with its indices as texts, and keeps what it was asked."""

    def __init__(self) -> None:
        self.rounds: list[Sequence[GenerationRequest]] = []

    async def generate_all(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        self.rounds.append(requests)
        return [[answer(request, index) for index in range(request.n)] for request in requests]


def answer(request: GenerationRequest, index: int) -> Completion:
    return Completion(
        request_id=request.request_id,
        index=index,
        tokens=(7, index),
        logprobs=(-0.5, -0.25),
        top_logprobs=((), ()),
        text=str(index),
        finish_reason="stop",
        weight_versions=(WeightSpan(version=3, start=0, end=2),),
    )


def problems_with(*answers: str) -> list[Problem]:
    return [
        Problem(problem_id=f"p{place}", messages=(Message(role="user", content="x" * (place + 1)),), answer=answer)
        for place, answer in enumerate(answers)
    ]


@pytest.fixture
def engine() -> Recorder:
    return Recorder()


@pytest.fixture
def make_collector(engine: Recorder) -> Callable[..., Collector]:
    """A collector over problems whose first `answer` of 4 completions are right; 0 and 4 have no signal."""

    def make(*answers: str, seed: int = 1, cursor: int = 0, **values: Any) -> Collector:
        problems = problems_with(*answers)
        settings = RolloutSettings(group_size=4, max_tokens=9, temperature=0.5, **values)
        stream = ProblemStream(problems, seed)
        # the fakes have just the methods that the collector uses
        collector = Collector(one_by_one(engine.generate_all), Letters(), Hardness(problems), stream, settings, seed)  # type: ignore[arg-type]
        collector.problem_cursor.restore({"cursor": cursor})
        return collector

    return make
