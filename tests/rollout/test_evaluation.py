import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from parallm.errors import ContextTooLong
from parallm.rollout.evaluation import Evaluator, wilson_interval
from parallm.types import Completion, EvaluationReport, GenerationRequest, Message, Problem, Split


class Graded:
    """Scores a completion with the parts that stand behind its problem's id."""

    weights: Mapping[str, float] = {}

    def __init__(self, **parts: Mapping[str, float]) -> None:
        self._parts = parts

    def problems(self, split: Split) -> Sequence[Problem]:
        return [
            Problem(problem_id=name, messages=(Message(role="user", content=name),), answer="") for name in self._parts
        ]

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        return self._parts[problem.problem_id]


class Letters:
    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(ord(letter) for letter in messages[0].content)


class Silent:
    """Answers every request with one empty completion."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    async def generate_all(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        self.requests += requests
        return [
            [
                Completion(
                    request_id=request.request_id,
                    index=0,
                    tokens=(),
                    logprobs=(),
                    top_logprobs=(),
                    text="",
                    finish_reason="stop",
                    weight_versions=(),
                )
            ]
            for request in requests
        ]


def evaluator_of(environment: Graded, generate_all: Any) -> Evaluator:
    problems = environment.problems("test")
    return Evaluator(
        generate_all=generate_all,
        tokenizer=Letters(),  # type: ignore[arg-type]  # it has just the method that is used
        environment=environment,
        problems=problems,
        max_tokens=9,
    )


def evaluate(environment: Graded) -> EvaluationReport:
    return asyncio.run(evaluator_of(environment, Silent().generate_all).evaluate(5, 4, "policy"))


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 10, 0.0, 0.2775327998628892),
        (10, 10, 0.7224672001371107, 1.0),
        (5, 10, 0.23659309051256395, 0.7634069094874361),
        (1, 1, 0.2065493143772375, 1.0),
        (450, 512, 0.8477906572251377, 0.9043784314848653),
    ],
)
def test_the_interval_is_wilsons(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-6)


def test_a_problem_counts_as_solved_if_its_correct_part_is_one() -> None:
    report = evaluate(
        Graded(a={"correct": 1, "format": 0}, b={"correct": 0, "format": 1}, c={"correct": 1, "format": 1})
    )
    assert (report.num_problems, report.accuracy) == (3, 2 / 3)
    assert report.reward_parts == {"correct": 2 / 3, "format": 2 / 3}
    assert (report.step, report.version) == (5, 4)


def test_without_a_correct_part_all_parts_must_be_one() -> None:
    assert evaluate(Graded(a={"x": 1, "y": 1}, b={"x": 1, "y": 0.5})).accuracy == 0.5


def test_an_evaluation_is_greedy_and_asks_each_problem_once() -> None:
    silent = Silent()
    environment = Graded(a={"correct": 1}, b={"correct": 1})
    asyncio.run(evaluator_of(environment, silent.generate_all).evaluate(1, 1, "policy@1"))
    assert [request.prompt_tokens for request in silent.requests] == [(97,), (98,)]
    assert {(one.n, one.sampling.temperature, one.model, one.traffic) for one in silent.requests} == {
        (1, 0.0, "policy@1", "rollout")
    }


def test_a_held_out_prompt_longer_than_the_context_is_named() -> None:
    async def refuse(_: Sequence[GenerationRequest]) -> list[list[Completion]]:
        raise ContextTooLong("too long")

    evaluator = evaluator_of(Graded(a={}, long={}, bc={}), refuse)
    with pytest.raises(ContextTooLong, match="problem long: too long"):
        asyncio.run(evaluator.evaluate(0, 0, "policy"))
