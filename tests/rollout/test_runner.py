"""Episodes of one turn and of several, with an engine whose answers are written down."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from parallm.environment.environment import AnyEnvironment
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.load import NANO
from parallm.rollout.runner import RolloutRunner
from parallm.rollout.scoring import ScoredEpisode
from parallm.rollout.settings import EpisodeSettings
from parallm.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Message,
    Problem,
    SamplingParams,
    Split,
    WeightSpan,
)

END = 1
PROBLEM = Problem(problem_id="p", messages=(Message(role="user", content="Tom has 3 bags of 4 apples"),), answer="12")


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(load_tokenizer(NANO))


class Script:
    """Answers each round of requests with the texts written down for it; `|` stands for the end token."""

    def __init__(self, tokenizer: ChatTokenizer, *rounds: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._rounds = iter(rounds)
        self.asked: list[Sequence[GenerationRequest]] = []

    async def generate_all(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        self.asked.append(requests)
        texts = iter(next(self._rounds))
        return [[self._completion(request, index, next(texts)) for index in range(request.n)] for request in requests]

    def _completion(self, request: GenerationRequest, index: int, text: str) -> Completion:
        tokens = self._tokenizer.encode_more(text.removesuffix("|"))
        tokens = (*tokens, END)[: request.sampling.max_tokens] if text.endswith("|") else tokens
        stopped = tokens[-1:] == (END,) or any(text.endswith(stop) for stop in request.sampling.stop)
        reason: FinishReason = "stop" if stopped else "length"
        return Completion(
            request_id=request.request_id,
            index=index,
            tokens=tokens,
            logprobs=tuple(-0.5 - place for place in range(len(tokens))),
            top_logprobs=(),
            text=text.removesuffix("|"),
            finish_reason=reason,
            weight_versions=(WeightSpan(version=len(self.asked), start=0, end=len(tokens)),),
        )


class Talker:
    """Answers what the given function says; scores the number of turns."""

    weights: Mapping[str, float] = {"turns": 1.0}
    stop = (" = ",)

    def __init__(self, answer: Callable[[Sequence[Message]], object]) -> None:
        self._answer = answer

    def problems(self, split: Split) -> Sequence[Problem]:
        return [PROBLEM]

    def reply(self, problem: Problem, turns: Sequence[Message]) -> Sequence[Message] | None:
        return self._answer(turns)  # type: ignore[return-value]  # wrong ones on purpose

    def score(self, problem: Problem, turns: Sequence[Message]) -> Mapping[str, float]:
        return {"turns": float(len(turns))}


def run_episodes(
    script: Script, environment: AnyEnvironment, tokenizer: ChatTokenizer, *, max_tokens: int = 60, max_turns: int = 8
) -> list[ScoredEpisode]:
    runner = RolloutRunner(script.generate_all, tokenizer, environment, EpisodeSettings(max_turns=max_turns))
    request = GenerationRequest(
        request_id="step-0-0",
        prompt_tokens=tokenizer.encode_chat(PROBLEM.messages),
        sampling=SamplingParams(max_tokens=max_tokens, seed=7),
        n=2,
    )
    (row,) = asyncio.run(runner.run_episodes([PROBLEM], [request]))
    return row


def write_on(text: str) -> Callable[[Sequence[Message]], object]:
    """Replies `text` after an open sum, and else ends the episode."""

    def answer(turns: Sequence[Message]) -> object:
        return [Message(role="assistant", content=text)] if turns[-1].content.endswith(" = ") else None

    return answer


def test_the_next_turn_goes_on_from_the_very_tokens_of_the_last_one(tokenizer: ChatTokenizer) -> None:
    script = Script(tokenizer, ["3 * 4 = ", "#### 7|"], ["\n#### 12|"])
    run_episodes(script, Talker(write_on("12")), tokenizer)
    (first,), (second,) = script.asked
    sum_and_result = (*tokenizer.encode_more("3 * 4 = "), *tokenizer.encode_more("12"))
    assert second.prompt_tokens == (*first.prompt_tokens, *sum_and_result)
    assert (second.n, second.sampling.max_tokens) == (1, 60 - len(sum_and_result))
    assert (first.sampling.stop, second.sampling.stop) == ((" = ",), (" = ",))
    assert first.sampling.seed == 7 != second.sampling.seed


def test_tokens_of_a_reply_are_not_learned_and_have_no_version(tokenizer: ChatTokenizer) -> None:
    script = Script(tokenizer, ["3 * 4 = ", "#### 7|"], ["\n#### 12|"])
    episode = run_episodes(script, Talker(write_on("12")), tokenizer)[0].episode
    assert tokenizer.decode(episode.tokens) == "3 * 4 = 12\n#### 12"
    assert episode.tokens[-1] == END
    assert episode.is_sampled == [True] * 4 + [False] * 2 + [True] * 5
    assert episode.logprobs == [-0.5, -1.5, -2.5, -3.5, 0.0, 0.0, -0.5, -1.5, -2.5, -3.5, -4.5]
    assert episode.weight_versions == [WeightSpan(version=1, start=0, end=4), WeightSpan(version=2, start=6, end=11)]


def test_an_episode_is_scored_by_its_turns(tokenizer: ChatTokenizer) -> None:
    script = Script(tokenizer, ["3 * 4 = ", "#### 7|"], ["\n#### 12|"])
    long, short = run_episodes(script, Talker(write_on("12")), tokenizer)
    assert [turn.content for turn in long.episode.turns] == ["3 * 4 = ", "12", "\n#### 12"]
    assert (long.score.reward, short.score.reward) == (3.0, 1.0)
    assert (long.episode.text, long.episode.finish_reason) == ("3 * 4 = 12\n#### 12", "stop")


def test_a_reply_of_another_role_is_written_by_the_template(tokenizer: ChatTokenizer) -> None:
    def ask_once(turns: Sequence[Message]) -> object:
        return [Message(role="user", content="more apples")] if len(turns) == 1 else None

    script = Script(tokenizer, ["12|", "13|"], ["14|", "15|"])
    episode = run_episodes(script, Talker(ask_once), tokenizer)[1].episode
    assert "".join(map(tokenizer.token_text, episode.tokens)) == "13<|end|><|user|>more apples<|assistant|>15<|end|>"
    assert sum(episode.is_sampled) == 6


def test_the_last_turn_is_not_stopped_for_an_answer_that_never_comes(tokenizer: ChatTokenizer) -> None:
    script = Script(tokenizer, ["3 * 4 = ", "3 + 4 = "], ["\n1 + 1 = ", "\n#### 7|"], ["2|"])
    row = run_episodes(script, Talker(write_on("12")), tokenizer, max_turns=3)
    assert [[request.sampling.stop for request in requests] for requests in script.asked] == [
        [(" = ",)],
        [(" = ",), (" = ",)],
        [()],
    ]
    assert row[0].episode.text == "3 * 4 = 12\n1 + 1 = 122"


def test_one_turn_is_an_environment_that_never_answers(tokenizer: ChatTokenizer) -> None:
    script = Script(tokenizer, ["3 * 4 = 12|", "3 + 4 = 7|"])
    row = run_episodes(script, Talker(write_on("12")), tokenizer, max_turns=1)
    assert script.asked[0][0].sampling.stop == ()
    assert [one.score.reward for one in row] == [1.0, 1.0]


def test_a_reply_that_leaves_no_room_ends_the_episode_before_it(tokenizer: ChatTokenizer) -> None:
    script = Script(tokenizer, ["3 * 4 = ", "#### 7|"])
    episode = run_episodes(script, Talker(write_on("12")), tokenizer, max_tokens=6)[0].episode
    assert (episode.text, episode.finish_reason) == ("3 * 4 = ", "length")
    assert len(episode.turns) == 1


def test_a_turn_that_is_cut_off_is_the_last_one(tokenizer: ChatTokenizer) -> None:
    script = Script(tokenizer, ["3 * 4", "#### 7|"])
    row = run_episodes(script, Talker(write_on("12")), tokenizer)
    assert (row[0].episode.finish_reason, len(script.asked)) == ("length", 1)


@pytest.mark.parametrize("reply", ["12", [], [12], 12, [Message(role="assistant", content="1"), PROBLEM.messages[0]]])
def test_a_reply_of_the_wrong_form_is_a_fault(tokenizer: ChatTokenizer, reply: object) -> None:
    script = Script(tokenizer, ["3 * 4 = ", "#### 7|"])
    wrong, right = run_episodes(
        script, Talker(lambda turns: None if turns[-1].content == "#### 7" else reply), tokenizer
    )
    assert wrong.score.fault is not None
    assert (wrong.score.fault.kind, wrong.score.fault.text) == ("reply_malformed", "3 * 4 = ")
    assert right.score.fault is None


def test_a_reply_that_raises_is_a_fault_of_its_episode(tokenizer: ChatTokenizer) -> None:
    script = Script(tokenizer, ["3 * 4 = ", "#### 7|"])
    wrong, right = run_episodes(script, Talker(lambda turns: None if len(turns[-1].content) < 8 else 1 / 0), tokenizer)
    assert wrong.score.fault is not None
    assert wrong.score.fault.kind == "reply_raised"
    assert right.score.reward == 1.0


class Counting:
    """Episodes that remember how often the model has spoken; the one of the group's place `broken` fails."""

    weights: Mapping[str, float] = {"spoken": 1.0}

    def __init__(self, broken: int | None = None) -> None:
        self._broken = broken
        self.opened: list[CountingEpisode] = []

    def problems(self, split: Split) -> Sequence[Problem]:
        return [PROBLEM]

    def open(self, problem: Problem, count: int) -> Sequence["CountingEpisode"]:
        self.opened = [CountingEpisode(is_broken=place == self._broken) for place in range(count)]
        return self.opened


class CountingEpisode:
    def __init__(self, *, is_broken: bool) -> None:
        self._is_broken = is_broken
        self._spoken = 0
        self.is_closed = False

    async def reply(self, turns: Sequence[Message]) -> Sequence[Message] | None:
        if self._is_broken:
            raise ValueError("broken")
        self._spoken += 1
        return [Message(role="user", content="more apples")] if self._spoken == 1 else None

    def score(self, turns: Sequence[Message], *, is_cut_off: bool) -> Mapping[str, float]:
        return {"spoken": float(self._spoken), "is_cut_off": float(is_cut_off)}

    def close(self) -> None:
        self.is_closed = True


def test_each_episode_of_a_group_has_a_state_of_its_own(tokenizer: ChatTokenizer) -> None:
    script = Script(tokenizer, ["12|", "13"], ["14|"])  # the second is cut off in its first turn
    first, second = run_episodes(script, Counting(), tokenizer)
    assert first.score.parts == {"spoken": 2, "is_cut_off": 0}
    assert second.score.parts == {"spoken": 0, "is_cut_off": 1}


def test_an_episode_whose_environment_fails_is_closed_and_the_others_go_on(tokenizer: ChatTokenizer) -> None:
    environment = Counting(broken=0)
    first, second = run_episodes(Script(tokenizer, ["12|", "13|"], ["14|"]), environment, tokenizer)
    assert first.score.fault is not None
    assert first.score.fault.kind == "reply_raised"
    assert second.score.reward == 2
    assert [episode.is_closed for episode in environment.opened] == [True, False]


class Unopened(Counting):
    """Fails to begin an episode: `open` does what it is given."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        super().__init__()
        self._answer = answer

    def open(self, problem: Problem, count: int) -> Any:
        return self._answer()


@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        (lambda: 1 / 0, "reply_raised", "ZeroDivisionError('division by zero')"),
        (lambda: None, "reply_malformed", "open returned None, not 2 sessions"),
        (lambda: [CountingEpisode(is_broken=False)], "reply_malformed", "open returned [<"),
    ],
    ids=["raises", "none", "too few"],
)
def test_episodes_that_cannot_begin_are_faults(
    tokenizer: ChatTokenizer, answer: Callable[[], Any], kind: str, detail: str
) -> None:
    for one in run_episodes(Script(tokenizer, ["12|", "13|"]), Unopened(answer), tokenizer):
        assert one.score.fault is not None
        assert one.score.fault.kind == kind
        assert one.score.fault.detail.startswith(detail)


def test_an_episode_that_cannot_be_closed_is_named(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CountingEpisode, "close", lambda _: 1 / 0)
    first, second = run_episodes(Script(tokenizer, ["12|", "13|"], ["14|"]), Counting(broken=0), tokenizer)
    assert first.score.fault is not None
    assert second.score.reward == 2
    assert caplog.messages == [
        f"problem {PROBLEM.problem_id}: closing an episode has failed: ZeroDivisionError('division by zero')"
    ]
