"""No episode waits for another one, and tokens are those of lock step."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from bench.compare import print_table
from bench.measurement import request_of_tests
from bench.processes import blas_name, work
from mlx_lm.utils import load_tokenizer

from parallm.errors import EngineStopped
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.load import NANO
from parallm.rollout.runner import Generate, RolloutRunner
from parallm.rollout.scoring import ScoredEpisode
from parallm.rollout.settings import EpisodeSettings
from parallm.types import Completion, GenerationRequest, Message, Problem, SamplingParams, Split
from tests.rollout.lock_step import LockStep

PROBLEM = Problem(problem_id="p", messages=(Message(role="user", content="apples"),), answer="")
REQUEST = GenerationRequest(request_id="r", prompt_tokens=(5,), sampling=SamplingParams(max_tokens=99, seed=7), n=2)
SECONDS = 0.5
PACES = pytest.mark.parametrize(("make", "waits"), [(RolloutRunner, False), (LockStep, True)], ids=["own", "lock step"])
Make = Callable[..., RolloutRunner]


class Waiting:
    """Two turns. The reply to the group's first episode, or its score, comes when `moment` has come."""

    weights: Mapping[str, float] = {"turns": 1.0}

    def __init__(self) -> None:
        self.moment = asyncio.Event()
        self.has_scored = asyncio.Event()

    def problems(self, split: Split) -> Sequence[Problem]:
        return [PROBLEM]

    async def reply(self, problem: Problem, turns: Sequence[Message]) -> Sequence[Message] | None:
        if turns[0].content == "0":
            await self.moment.wait()
        return [Message(role="user", content="more")] if len(turns) == 1 else None

    async def score(self, problem: Problem, turns: Sequence[Message]) -> Mapping[str, float]:
        self.has_scored.set()
        return {"turns": float(len(turns))}


def completion(request: GenerationRequest, index: int) -> Completion:
    """Its text is its index; the end token is 1."""
    tokens = (*TOKENIZER.encode_more(str(index)), 1)
    return Completion(
        request_id=request.request_id,
        index=index,
        tokens=tokens,
        logprobs=(-0.5,) * len(tokens),
        top_logprobs=(),
        text=str(index),
        finish_reason="stop",
        weight_versions=(),
    )


TOKENIZER = ChatTokenizer(load_tokenizer(NANO))


async def episodes(make: Make, generate: Generate, environment: Waiting, max_turns: int) -> list[ScoredEpisode]:
    runner = make(generate, TOKENIZER, environment, EpisodeSettings(max_turns=max_turns))
    async with asyncio.timeout(SECONDS):
        (group,) = await runner.run_episodes([PROBLEM], [REQUEST])
    return group


def expect(run: Callable[[], object], *, waits: bool) -> None:
    """Lock step waits for what only another episode brings about, forever."""
    if waits:
        with pytest.raises(TimeoutError):
            run()
    else:
        run()


@PACES
def test_an_episode_is_scored_while_others_sample(make: Make, waits: bool) -> None:
    async def main() -> None:
        environment = Waiting()

        async def generate(requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, Completion], None]:
            yield 0, completion(requests[0], 1)
            await environment.has_scored.wait()
            yield 0, completion(requests[0], 0)

        first, second = await episodes(make, generate, environment, max_turns=1)
        assert (first.episode.text, second.episode.text) == ("0", "1")

    expect(lambda: asyncio.run(main()), waits=waits)


@PACES
def test_a_slow_reply_holds_no_other_episode(make: Make, waits: bool) -> None:
    async def main() -> None:
        environment = Waiting()

        async def generate(requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, Completion], None]:
            for place, request in enumerate(requests):
                if request.request_id == "r-1-1":  # the second turn of the other episode
                    environment.moment.set()
                for index in range(request.n):
                    yield place, completion(request, index)

        assert [one.score.reward for one in await episodes(make, generate, environment, max_turns=3)] == [3.0, 3.0]

    expect(lambda: asyncio.run(main()), waits=waits)


def test_an_error_of_one_turn_ends_the_others_and_is_raised_as_it_is() -> None:
    ended: list[str] = []

    async def main() -> None:
        environment, sampling = Waiting(), asyncio.Event()
        environment.moment.set()

        async def generate(requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, Completion], None]:
            (request,) = requests
            try:
                if request.request_id == "r-0-1":
                    sampling.set()
                    await asyncio.Event().wait()
                if request.request_id == "r-1-1":
                    await sampling.wait()
                    raise EngineStopped("gone")
                for index in range(request.n):
                    yield 0, completion(request, index)
            finally:
                ended.append(request.request_id)

        await episodes(RolloutRunner, generate, environment, max_turns=3)

    with pytest.raises(EngineStopped, match=r"^gone$"):
        asyncio.run(main())
    assert sorted(ended) == ["r", "r-0-1", "r-1-1"]


def test_whoever_cancels_a_step_cancels_its_episodes() -> None:
    ended: list[str] = []

    async def main() -> None:
        async def generate(requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, Completion], None]:
            try:
                yield 0, completion(requests[0], 1)
                await asyncio.Event().wait()
            finally:
                ended.append(requests[0].request_id)

        await episodes(RolloutRunner, generate, Waiting(), max_turns=3)

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert sorted(ended) == ["r", "r-1-1"]


class Session:
    """The first episode ends after its first turn; the others never get a reply."""

    def __init__(self, index: int) -> None:
        self.num_closed = 0
        self._index = index

    async def reply(self, turns: Sequence[Message]) -> Sequence[Message] | None:
        if self._index:
            await asyncio.Event().wait()
        return None

    async def score(self, turns: Sequence[Message], *, is_cut_off: bool) -> Mapping[str, float]:
        return {"turns": float(len(turns))}

    def close(self) -> None:
        self.num_closed += 1


class Sessions(Waiting):
    def __init__(self) -> None:
        super().__init__()
        self.opened: list[Session] = []

    def open(self, problem: Problem, count: int) -> Sequence[Session]:
        self.opened = [Session(index) for index in range(count)]
        return self.opened


@pytest.mark.parametrize(("fails", "error"), [(True, EngineStopped), (False, TimeoutError)], ids=["fails", "cancelled"])
def test_sessions_of_episodes_that_are_never_scored_are_closed(fails: bool, error: type[Exception]) -> None:
    environment = Sessions()

    async def main() -> None:
        async def generate(requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, Completion], None]:
            yield 0, completion(requests[0], 0)
            yield 0, completion(requests[0], 1)
            await environment.has_scored.wait()
            if fails:
                raise EngineStopped("gone")
            await asyncio.Event().wait()  # the third one never ends

        runner = RolloutRunner(generate, TOKENIZER, environment, EpisodeSettings(max_turns=3))
        async with asyncio.timeout(SECONDS):
            await runner.run_episodes([PROBLEM], [replace(REQUEST, n=3)], lambda _: environment.has_scored.set())

    with pytest.raises(error):
        asyncio.run(main())
    assert [session.num_closed for session in environment.opened] == [0, 1, 1]


def measure(**job: Any) -> dict[str, Any]:
    """Seconds of each way. Raises RuntimeError if the ways sample different tokens."""
    return work("tests.rollout.lock_step", **job)


@pytest.mark.skipif(not blas_name().endswith("strict"), reason="only a strict BLAS computes a row alike in any company")
def test_tokens_are_those_of_lock_step() -> None:
    found = measure(episodes=6, at_once=3, turns=4, lengths=(2, 40), reply_seconds=(0.001, 0.05))
    assert set(found) == {"ahead", "steps", "lock step", "lock step ahead"}


@pytest.mark.slow
def test_episodes_a_minute(record_property: Callable[[str, object], None]) -> None:
    """Episodes a minute of steps that wait for their slowest episode, over those of lock step, step after step.

    `vs_lock_step` samples one step ahead (trainer.max_off_policy_steps=1), `steps_vs_lock_step` none, as is the
    default; `ahead_vs_lock_step_ahead` has lock step sample ahead as well. Controls: equal lengths and immediate
    replies; scores that block. A share is that of a step without scores.
    """
    size = request_of_tests().size
    turns = {"at_once": size(32, 2), "turns": size(8, 2)}
    slow = turns | {"lengths": (16, size(512, 32)), "reply_seconds": (0.05, size(20, 1) / 10)}
    equal = turns | {"lengths": (64, 64), "reply_seconds": (1e-4, 1e-4)}
    ragged, even = (measure(**job, episodes=4 * turns["at_once"]) for job in (slow, equal))
    plain, scored, blocked = (
        measure(**slow, episodes=turns["at_once"], ways=["steps"], score_seconds=seconds, is_async=is_async)["steps"]
        for seconds, is_async in ((0, True), (1, True), (1, False))
    )
    print_table("Seconds", [("", *ragged), ("ragged", *ragged.values()), ("even", *even.values())])
    print_table("Seconds of a step", [("no scores", "1 s each", "blocking"), (plain, scored, blocked)])
    record_property("episodes.vs_lock_step", ragged["lock step"] / ragged["ahead"])
    record_property("episodes.steps_vs_lock_step", ragged["lock step"] / ragged["steps"])
    record_property("episodes.ahead_vs_lock_step_ahead", ragged["lock step ahead"] / ragged["ahead"])
    record_property("episodes.control_vs_lock_step", even["lock step"] / even["steps"])
    record_property("episodes.scoring_share", scored / plain - 1)
    record_property("episodes.control_scoring_share", blocked / plain - 1)
