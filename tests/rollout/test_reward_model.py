"""The part that a reward model adds to the scores of episodes."""

import asyncio
import math
from collections.abc import Mapping, Sequence

import pytest
from mlx_lm.utils import load_tokenizer

from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.load import NANO
from parallm.rollout.reward_model import RewardModel
from parallm.rollout.runner import RolloutRunner
from parallm.rollout.scoring import ScoredEpisode
from parallm.rollout.settings import EpisodeSettings
from parallm.types import (
    Completion,
    GenerationRequest,
    Message,
    Problem,
    SamplingParams,
    ScoringRequest,
    Split,
    WeightSpan,
)

END = 1
PROBLEMS = [
    Problem(problem_id=f"p{place}", messages=(Message(role="user", content="?" * (place + 1)),), answer="")
    for place in range(2)
]


class Exact:
    """A text is right if it says so; one that says `broken` cannot be scored."""

    weights: Mapping[str, float] = {"right": 0.5}

    def problems(self, split: Split) -> Sequence[Problem]:
        return PROBLEMS

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        if text == "broken":
            raise ValueError(text)
        return {"right": float(text == "right")}


class Rater:
    """Scores the first completion it sees with `first`, each further one with one more, and remembers what it saw."""

    def __init__(self, first: float) -> None:
        self._first = first
        self.seen: list[ScoringRequest] = []

    async def rate(self, items: Sequence[ScoringRequest]) -> list[float]:
        self.seen += items
        return [self._first + place for place in range(sum(len(item.completions) for item in items))]


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(load_tokenizer(NANO))


def run_episodes(tokenizer: ChatTokenizer, rater: Rater, *texts: Sequence[str]) -> list[list[ScoredEpisode]]:
    """Completions of one problem after the other; `|` stands for the end token."""

    async def generate_all(requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        return [
            [completion(tokenizer, request, index, text) for index, text in enumerate(row)]
            for request, row in zip(requests, texts, strict=True)
        ]

    model = RewardModel(rate=rater.rate, weight=0.25, tokenizer=tokenizer)
    runner = RolloutRunner(generate_all, tokenizer, Exact(), EpisodeSettings(max_turns=1), model)
    problems = PROBLEMS[: len(texts)]
    requests = [
        GenerationRequest(
            request_id=one.problem_id,
            prompt_tokens=tokenizer.encode_chat(one.messages),
            sampling=SamplingParams(max_tokens=9),
        )
        for one in problems
    ]
    return asyncio.run(runner.run_episodes(problems, requests))


def completion(tokenizer: ChatTokenizer, request: GenerationRequest, index: int, text: str) -> Completion:
    tokens = (*tokenizer.encode_more(text.removesuffix("|")), *((END,) if text.endswith("|") else ()))
    return Completion(
        request_id=request.request_id,
        index=index,
        tokens=tokens,
        logprobs=(-0.5,) * len(tokens),
        top_logprobs=(),
        text=text.removesuffix("|"),
        finish_reason="stop" if text.endswith("|") else "length",
        weight_versions=(WeightSpan(version=3, start=0, end=len(tokens)),),
    )


def test_the_part_is_added_with_its_weight_to_each_episode(tokenizer: ChatTokenizer) -> None:
    rows = run_episodes(tokenizer, Rater(-2.0), ["right|", "wrong|"], ["right|"])
    parts = [[one.score.parts for one in row] for row in rows]
    assert parts == [
        [{"right": 1.0, "rollout/reward_model": -2.0}, {"right": 0.0, "rollout/reward_model": -1.0}],
        [{"right": 1.0, "rollout/reward_model": 0.0}],
    ]
    assert [[one.score.reward for one in row] for row in rows] == [[0.0, -0.25], [0.5]]
    assert [[one.score.is_correct for one in row] for row in rows] == [[True, False], [True]]


def test_the_tokens_that_were_sampled_are_scored_up_to_an_end(tokenizer: ChatTokenizer) -> None:
    rater = Rater(0.0)
    run_episodes(tokenizer, rater, ["right|", "cut"])
    (item,) = rater.seen
    assert item.prompt_tokens == tokenizer.encode_chat(PROBLEMS[0].messages)
    assert item.completions == ((*tokenizer.encode_more("right"), END), (*tokenizer.encode_more("cut"), END))


def test_what_cannot_be_scored_by_the_environment_is_not_shown_to_the_reward_model(tokenizer: ChatTokenizer) -> None:
    rater = Rater(7.0)
    rows = run_episodes(tokenizer, rater, ["broken|", "wrong|"], ["broken|"])
    assert [len(item.completions) for item in rater.seen] == [1]
    faults = [[one.score.fault is not None for one in row] for row in rows]
    assert faults == [[True, False], [True]]
    assert rows[0][1].score.parts["rollout/reward_model"] == 7.0


@pytest.mark.parametrize(("score", "kind"), [(math.nan, "score_not_finite"), (1e30, "score_too_large")])
def test_a_score_that_cannot_be_learned_from_costs_its_episode(
    tokenizer: ChatTokenizer, score: float, kind: str
) -> None:
    ((one,),) = run_episodes(tokenizer, Rater(score), ["right|"])
    assert one.score.fault is not None
    assert (one.score.fault.kind, one.score.fault.detail) == (kind, f"the reward model's score is {score}")
    assert one.score.parts == {}
