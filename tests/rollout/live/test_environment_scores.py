"""Rewards by environments' own scoring, under their names."""

import asyncio
import logging
import sys
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from parallm.environment.environment import AnyEnvironment, Mixed
from parallm.environment.gsm8k import Gsm8k
from parallm.environment.settings import Gsm8kSettings
from parallm.errors import InvalidRequest
from parallm.rollout.live.scoring_functions import (
    ScoringInput,
    as_number,
    environment_scoring_functions,
    shipped_scoring_functions,
)
from parallm.rollout.live.source import LiveSource
from parallm.types import GenerationRequest, Problem, SamplingParams, Split

RIGHT = "2 + 3 = 5\n#### 5"
CONTRACT = {"environment": "math", "difficulty": "hard"}


def answered(text: str, **metadata: Any) -> ScoringInput:
    return ScoringInput(prompt="2 + 3?", text=text, finish_reason="stop", metadata=metadata)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("gsm8k", {"correct": 1.0}, {"correct": 0.0}),
        ("arithmetic", {"correct": 0.9, "format": 0.1}, {"correct": 0.0, "format": 0.0}),
        ("calculator", {"correct": 0.9, "format": 0.1}, {"correct": 0.0, "format": 0.0}),
    ],
)
@pytest.mark.parametrize("answer", ["5", 5, 5.0, "+5", " 5.00", "2 and 3 are 5\n#### 5"])
def test_the_answer_comes_in_metadata(name: str, right: object, wrong: object, answer: object) -> None:
    score = shipped_scoring_functions()[name]
    assert score(answered(RIGHT, answer=answer)) == right
    assert score(answered("no idea", answer=answer)) == wrong


def test_answers_are_compared_as_numbers() -> None:
    assert [as_number(text) for text in ("1,000", "$100", "-0.50", "12.", "#### 007")] == [
        "1000",
        "100",
        "-0.5",
        "12",
        "7",
    ]
    assert [as_number(text) for text in ("", "five", "5 apples", "#### five", "1e3")] == [None] * 5


@pytest.mark.parametrize("answer", ["five", True, [5], {"value": 5}, ""])
def test_an_answer_that_cannot_be_compared_with_is_refused_at_once(
    make: Callable[..., LiveSource], answer: object
) -> None:
    request = GenerationRequest(request_id="r", prompt_tokens=(1,), sampling=SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match=r"metadata\.answer is .*; gsm8k compares with a number") as caught:
        make().check(request, "gsm8k", {"answer": answer})
    assert caught.value.parameter == "metadata"
    make().check(request, "gsm8k", CONTRACT)


def test_without_an_answer_the_reward_is_left_to_the_client(
    make: Callable[..., LiveSource], record: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    source = make()

    async def main() -> None:
        source.connect(lambda tokens: "p" * len(tokens))
        with caplog.at_level(logging.WARNING):
            for name in "abc":
                record(source, name, scoring_function="gsm8k", metadata=CONTRACT, text=RIGHT)
            record(source, "scored", scoring_function="gsm8k", metadata=CONTRACT | {"answer": "5"}, text=RIGHT)
            await until(lambda: source.report().num_rewarded == 1 and caplog.text.count("no metadata.answer") == 2)
        assert (source.report().num_waiting, source.report().num_rewarded) == (3, 1)
        source.reward("a", 0.5)
        assert (source.report().num_waiting, source.report().num_rewarded) == (2, 2)
        await source.close()

    asyncio.run(main())  # the log counts one and two, and not three
    assert source.report().dropped == {}


class Shout:
    """An environment of the user's own."""

    weights: Mapping[str, float] = {"loud": 2.0, "seen": 0.0}

    def problems(self, split: Split) -> Sequence[Problem]:
        return ()

    def score(self, problem: Problem, text: str) -> Awaitable[Mapping[str, float]]:
        async def later() -> Mapping[str, float]:
            return {"loud": float(text == problem.answer.upper()), "seen": 1.0, "unweighted": 1.0}

        return later()


class Stateful:
    weights: Mapping[str, float] = {}

    def problems(self, split: Split) -> Sequence[Problem]:
        return ()

    def open(self, problem: Problem, count: int) -> Sequence[Any]:
        raise AssertionError


def parts_of(environment: AnyEnvironment, name: str, text: str, answer: str) -> object:
    async def main() -> object:
        found = environment_scoring_functions("custom", environment)[name](answered(text, answer=answer))
        return await found if isinstance(found, Awaitable) else found

    return asyncio.run(main())


def test_the_environment_of_a_run_scores_too_with_its_weights() -> None:
    assert parts_of(Shout(), "custom", "HI", "hi") == {"loud": 2.0}
    assert parts_of(Shout(), "custom", "", "") == {"loud": 2.0}  # its own business
    assert environment_scoring_functions("verifiers", Stateful()) == {}


def test_a_function_of_the_configuration_wins(
    make: Callable[..., LiveSource], record: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("own_scores")
    module.__dict__["always"] = lambda _: 3.0
    monkeypatch.setitem(sys.modules, "own_scores", module)
    source = make(scoring_functions={"gsm8k": "own_scores:always"})

    async def main() -> None:
        source.connect(lambda tokens: "p" * len(tokens), environment_scoring_functions("gsm8k", Gsm8k(Gsm8kSettings())))
        record(source, "a", scoring_function="gsm8k")
        record(source, "b", reward=0.0)
        await until(lambda: source.report().num_rewarded == 2)
        assert [group.rewards for group in source.take(1).groups] == [(3.0, 0.0)]
        await source.close()

    asyncio.run(main())


def test_the_parts_of_a_mixture_score_by_their_names_and_settings(
    make: Callable[..., LiveSource], record: Callable[..., None]
) -> None:
    lenient = Gsm8k(Gsm8kSettings(reading="lenient", format_weight=0.25))
    mixed = Mixed(environments={"gsm8k": lenient, "shout": Shout()}, shares={"gsm8k": 1.0, "shout": 1.0})
    assert environment_scoring_functions("mixed", mixed).keys() == {"gsm8k", "shout"}
    assert parts_of(mixed, "gsm8k", "it is 5", "5") == {"correct": 1.0, "format": 0.0}
    source = make()

    async def main() -> None:
        source.connect(lambda tokens: "p" * len(tokens), environment_scoring_functions("mixed", mixed))
        record(source, "a", scoring_function="gsm8k", metadata={"answer": 5}, text="it is 5")
        record(source, "b", scoring_function="shout", metadata={"answer": "no"}, text="NO")
        await until(lambda: source.report().num_rewarded == 2)
        assert [group.rewards for group in source.take(1).groups] == [(1.0, 2.0)]
        await source.close()

    asyncio.run(main())
