import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from parallm.environment.environment import AnyEnvironment, Mixed
from parallm.errors import ContextTooLong
from parallm.reports import Evaluation, EvaluationReport
from parallm.rollout.collector import Collector
from parallm.rollout.evaluation import Evaluator, Samples
from parallm.rollout.problems import ProblemStream
from parallm.rollout.settings import EpisodeSettings, RolloutSettings
from parallm.types import Completion, GenerationRequest, Message, Problem, Split


class Graded:
    """Scores a completion with the parts that follow its problem's id."""

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
    """Answers every request without tokens; the text of a completion is its index."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    async def generate_all(
        self, requests: Sequence[GenerationRequest], progress: Callable[[int], None] = lambda done: None
    ) -> list[list[Completion]]:
        self.requests += requests
        for done in range(1, sum(request.n for request in requests) + 1):
            progress(done)
        return [
            [
                Completion(
                    request_id=request.request_id,
                    index=index,
                    tokens=(),
                    logprobs=(),
                    top_logprobs=(),
                    text=str(index),
                    finish_reason="stop",
                    weight_versions=(),
                )
                for index in range(request.n)
            ]
            for request in requests
        ]


def evaluator_of(environment: AnyEnvironment, generate_all: Any, samples: Samples | None = None) -> Evaluator:
    problems = environment.problems("test")
    return Evaluator(
        generate_all=generate_all,
        tokenizer=Letters(),  # type: ignore[arg-type]  # it has just the method that is used
        environment=environment,
        problems=problems,
        rollout=EpisodeSettings(max_tokens=9),
        samples=samples,
    )


def evaluated(evaluator: Evaluator, version: int = 4, model: str = "policy") -> Evaluation:
    return asyncio.run(evaluator.evaluate(5, version, model, lambda done, total: None))


def evaluate(environment: Graded) -> EvaluationReport:
    return evaluated(evaluator_of(environment, Silent().generate_all)).report


def test_a_problem_counts_as_solved_if_its_correct_part_is_one() -> None:
    report = evaluate(
        Graded(a={"correct": 1, "format": 0}, b={"correct": 0, "format": 1}, c={"correct": 1, "format": 1})
    )
    assert (report.num_problems, report.accuracy) == (3, 2 / 3)
    assert {name: part.mean for name, part in report.reward_parts.items()} == {"correct": 2 / 3, "format": 2 / 3}
    assert (report.step, report.version) == (5, 4)


def test_without_a_correct_part_all_parts_must_be_one() -> None:
    assert evaluate(Graded(a={"x": 1, "y": 1}, b={"x": 1, "y": 0.5})).accuracy == 0.5


def test_an_evaluation_is_greedy_and_asks_each_problem_once() -> None:
    silent = Silent()
    environment = Graded(a={"correct": 1}, b={"correct": 1})
    evaluated(evaluator_of(environment, silent.generate_all), model="policy@1")
    assert [request.prompt_tokens for request in silent.requests] == [(97,), (98,)]
    assert {(one.n, one.sampling.temperature, one.model, one.traffic) for one in silent.requests} == {
        (1, 0.0, "policy@1", "rollout")
    }


def test_a_held_out_prompt_longer_than_the_context_is_named() -> None:
    async def refuse(*_: Any) -> list[list[Completion]]:
        raise ContextTooLong("too long")

    evaluator = evaluator_of(Graded(a={}, long={}, bc={}), refuse)
    with pytest.raises(ContextTooLong, match="problem long: too long"):
        evaluated(evaluator)


class ReadsAs(Graded):
    """One of several environments, with one problem."""

    def __init__(self, parts: Mapping[str, Mapping[str, float]]) -> None:
        super().__init__(**parts)

    def problems(self, split: Split) -> Sequence[Problem]:
        return [Problem(problem_id="a", messages=(Message(role="user", content="a"),), answer="")]


class Counted(Graded):
    """Of the samples of a problem, the first `correct` are right."""

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        return {"correct": float(int(text) < self._parts[problem.problem_id]["correct"])}


SAMPLES = Samples(count=4, temperature=0.7, ks=(1, 2, 4), seed=3)


def test_samples_of_each_problem_give_pass_at_k() -> None:
    environment = Counted(never={"correct": 0}, once={"correct": 1}, always={"correct": 4})
    evaluator = evaluator_of(environment, Silent().generate_all, SAMPLES)
    report = evaluated(evaluator).report
    assert report.accuracy == pytest.approx(2 / 3)  # the greedy completion has index 0
    assert {k: estimate.mean for k, estimate in report.pass_at.items()} == pytest.approx(
        {1: (0 + 1 / 4 + 1) / 3, 2: (0 + 1 / 2 + 1) / 3, 4: 2 / 3}
    )
    assert (report.num_samples, report.temperature) == (4, 0.7)


def test_every_evaluation_samples_with_the_same_seeds_one_for_each_problem() -> None:
    silent = Silent()
    evaluator = evaluator_of(Counted(a={"correct": 1}, b={"correct": 1}), silent.generate_all, SAMPLES)
    for version in (1, 2):
        evaluated(evaluator, version, f"policy@{version}")
    sampled = [request for request in silent.requests if request.n == 4]
    assert [request.sampling.temperature for request in sampled] == [0.7] * 4
    seeds = [request.sampling.seed for request in sampled]
    assert seeds[:2] == seeds[2:]
    assert len(set(seeds)) == 2


def test_an_evaluation_never_samples_with_the_seeds_of_a_training_step() -> None:
    silent = Silent()
    environment = Counted(a={"correct": 1}, b={"correct": 1})
    evaluated(evaluator_of(environment, silent.generate_all, SAMPLES))
    settings = RolloutSettings(problems_per_step=2)
    collector = Collector(
        silent.generate_all,
        Letters(),  # type: ignore[arg-type]  # it has just the method that is used
        environment,
        ProblemStream(environment.problems("train"), seed=SAMPLES.seed),
        settings,
        seed=SAMPLES.seed,
    )
    for step in range(20):
        asyncio.run(collector.collect(step, "policy"))
    of_evaluation = {request.sampling.seed for request in silent.requests if request.n == SAMPLES.count}
    of_training = {request.sampling.seed for request in silent.requests if request.n == settings.group_size}
    assert len(of_evaluation) == 2
    assert len(of_training) >= 40
    assert of_evaluation.isdisjoint(of_training)


def test_the_names_of_one_evaluations_requests_differ() -> None:
    silent = Silent()
    one = Samples(count=1, temperature=1.0, ks=(1,), seed=0)
    evaluator = evaluator_of(Counted(a={"correct": 1}, b={"correct": 1}), silent.generate_all, one)
    evaluated(evaluator)
    assert len({request.request_id for request in silent.requests}) == 4


def test_rewards_have_intervals_within_what_the_weights_can_pay() -> None:
    environment = Graded(a={"correct": 1}, b={"correct": 1}, c={"correct": 1}, d={"correct": 1})
    environment.weights = {"correct": 2.0}
    reward = evaluate(environment).reward
    assert (reward.mean, reward.high) == (2.0, 2.0)
    assert reward.low == pytest.approx(2 * (1 - 0.6024), abs=0.01)  # that of 4 of 4, doubled


def test_a_penalty_that_was_never_seen_is_possible() -> None:
    environment = Graded(**{str(place): {"correct": 1, "insult": 0} for place in range(8)})
    environment.weights = {"correct": 1.0, "insult": -5.0}
    assert evaluate(environment).reward.low < -1


def test_the_rewards_of_a_mixture_reach_as_far_as_those_of_any_environment() -> None:
    parts = {"rich/a": {"correct": 1}, "poor/a": {"correct": 1}}
    rich, poor = ReadsAs(parts), ReadsAs(parts)
    rich.weights, poor.weights = {"correct": 4.0}, {"correct": 1.0}
    mixed = Mixed(environments={"rich": rich, "poor": poor}, shares={"rich": 1.0, "poor": 1.0})
    evaluator = evaluator_of(mixed, Silent().generate_all)
    reward = evaluated(evaluator).report.reward
    assert reward.mean == 2.5
    assert 3.5 < reward.high <= 4


def test_progress_counts_finished_completions() -> None:
    seen: list[tuple[int, int]] = []
    evaluator = evaluator_of(Graded(a={"correct": 1}, b={"correct": 1}), Silent().generate_all, SAMPLES)
    asyncio.run(evaluator.evaluate(1, 1, "policy", lambda done, total: seen.append((done, total))))
    assert seen == [(done, 10) for done in range(1, 11)]


def test_completions_are_kept_with_their_scores() -> None:
    environment = Counted(a={"correct": 1}, b={"correct": 0})
    environment.weights = {"correct": 0.5}
    outcomes = asyncio.run(
        evaluator_of(environment, Silent().generate_all, SAMPLES).outcomes("policy", lambda done, total: None)
    )
    first, second = outcomes.greedy
    assert (first.problem_id, first.prompt, first.completion, first.reward, first.sample) == ("a", "a", "0", 0.5, None)
    assert (second.is_correct, second.parts) == (False, {"correct": 0.0})
    assert [(one.problem_id, one.sample) for one in outcomes.completions[2:]] == [
        (name, k) for name in "ab" for k in range(4)
    ]
