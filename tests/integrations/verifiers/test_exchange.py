"""Environments that call the model themselves, as replies and scores."""

import asyncio
from collections.abc import Mapping

import pytest

from parallm.integrations.verifiers.exchange import Drive, Exchange, NoMoreTurns, UnsupportedEpisode
from parallm.types import Message

QUESTION = Message(role="user", content="2 + 3")
MORE = Message(role="user", content="and 4 more")


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


async def two_questions(exchange: Exchange) -> Mapping[str, float]:
    first = await exchange.ask([QUESTION])
    second = await exchange.ask([QUESTION, said(first.text), MORE])
    return {"right": float((first.text, second.text) == ("5", "9")), "cut_off": float(second.is_cut_off)}


def test_the_second_question_is_the_reply_to_the_first_answer() -> None:
    async def play() -> None:
        exchange = Exchange(two_questions, [QUESTION])
        assert await exchange.reply([said("5")]) == [MORE]
        assert await exchange.reply([said("5"), MORE, said("9")]) is None
        assert await exchange.score([said("5"), MORE, said("9")], is_cut_off=False) == {"right": 1, "cut_off": 0}

    asyncio.run(play())


def test_a_last_turn_that_nobody_replied_to_is_scored() -> None:
    async def play() -> None:
        exchange = Exchange(two_questions, [QUESTION])
        await exchange.reply([said("5")])
        assert await exchange.score([said("5"), MORE, said("9")], is_cut_off=True) == {"right": 1, "cut_off": 1}

    asyncio.run(play())


def test_an_environment_that_asks_beyond_the_last_turn_is_told_so_and_scores_what_there_is() -> None:
    async def stubborn(exchange: Exchange) -> Mapping[str, float]:
        answers = []
        try:
            while True:
                answers.append((await exchange.ask([QUESTION])).text)
        except NoMoreTurns:
            return {"answers": float(len(answers))}

    async def play() -> None:
        assert await Exchange(stubborn, [QUESTION]).score([said("5")], is_cut_off=False) == {"answers": 1}

    asyncio.run(play())


def test_what_the_environment_raises_is_raised_when_it_is_scored() -> None:
    async def broken(exchange: Exchange) -> Mapping[str, float]:
        await exchange.ask([QUESTION])
        raise ValueError("no such file")

    async def play() -> None:
        exchange = Exchange(broken, [QUESTION])
        assert await exchange.reply([said("5")]) is None
        with pytest.raises(ValueError, match="no such file"):
            await exchange.score([said("5")], is_cut_off=False)

    asyncio.run(play())


def asks(*second: Message) -> Drive:
    async def drive(exchange: Exchange) -> Mapping[str, float]:
        await exchange.ask([QUESTION])
        await exchange.ask(second)
        return {}

    return drive


@pytest.mark.parametrize(
    "second",
    [
        (Message(role="user", content="2 + 4"), said("5"), MORE),
        (QUESTION, MORE),
        (QUESTION, said("5")),
    ],
    ids=["another first question", "the answer left out", "nothing new"],
)
def test_an_environment_that_changes_what_was_said_is_refused(second: tuple[Message, ...]) -> None:
    async def play() -> None:
        exchange = Exchange(asks(*second), [QUESTION])
        with pytest.raises(UnsupportedEpisode, match="cannot be trained on"):
            await exchange.reply([said("5")])
        exchange.close()

    asyncio.run(play())


def test_reasoning_that_the_environment_cuts_out_of_an_answer_does_no_harm() -> None:
    async def play() -> None:
        exchange = Exchange(asks(QUESTION, said("5"), MORE), [QUESTION])
        assert await exchange.reply([said("<think>2, 3</think>5")]) == [MORE]
        exchange.close()

    asyncio.run(play())


def test_an_episode_that_begins_otherwise_than_its_problem_is_refused() -> None:
    async def play() -> None:
        exchange = Exchange(two_questions, [MORE])
        with pytest.raises(UnsupportedEpisode, match="begins with"):
            await exchange.reply([said("5")])
        exchange.close()

    asyncio.run(play())


def test_the_first_question_can_be_looked_at_before_there_is_a_problem() -> None:
    async def play() -> None:
        exchange = Exchange(two_questions)
        assert await exchange.opening() == (QUESTION,)
        exchange.close()

    asyncio.run(play())


def test_a_closed_episode_is_cancelled_where_it_is() -> None:
    ends: list[str] = []

    async def lasting(exchange: Exchange) -> Mapping[str, float]:
        try:
            await exchange.ask([QUESTION])
            await asyncio.sleep(60)
        finally:
            ends.append("ended")
        return {}

    async def play() -> None:
        exchange = Exchange(lasting, [QUESTION])
        reply = asyncio.ensure_future(exchange.reply([said("5")]))
        await asyncio.sleep(0.01)
        exchange.close()
        assert await reply is None

    asyncio.run(play())
    assert ends == ["ended"]


def test_episodes_that_are_scored_together_end_their_turns_before() -> None:
    both = asyncio.Event()

    async def scored_with_another(exchange: Exchange) -> Mapping[str, float]:
        await exchange.ask([QUESTION])
        exchange.end_questions()
        await both.wait()
        return {"right": 1}

    async def play() -> None:
        exchange = Exchange(scored_with_another, [QUESTION])
        assert await exchange.reply([said("5")]) is None
        both.set()
        assert await exchange.score([said("5")], is_cut_off=False) == {"right": 1}

    asyncio.run(play())
