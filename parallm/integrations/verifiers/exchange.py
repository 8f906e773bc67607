"""Inversion of control for an environment that calls the model: its questions become the replies of a session.

The environment's coroutine calls `ask`; `VerifiersSession` calls `reply` and `score`. Knows nothing of verifiers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from parallm.conversation import ToolCall
from parallm.types import Message

ASSISTANT = "assistant"


class NoMoreTurns(Exception):
    """The environment asks again, but the episode has no turn or token left."""


class UnsupportedEpisode(Exception):
    """The environment's messages cannot be appended to the tokens of the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTurn:
    """One turn of the model."""

    text: str
    is_cut_off: bool
    calls: tuple[ToolCall, ...] = ()


Drive: TypeAlias = "Callable[[Exchange], Awaitable[Mapping[str, float]]]"
"""A coroutine function that plays an episode: calls `ask` for each turn of the model and returns the reward parts."""


class Exchange:
    """One episode: the environment's coroutine asks, the rollout runner answers. Lives on the environment's loop."""

    def __init__(self, drive: Drive, opening: Sequence[Message] = ()) -> None:
        self._drive = drive
        self._opening = tuple(opening)
        self._conversation: list[Message] = []
        self._questions: asyncio.Queue[tuple[Message, ...] | None] = asyncio.Queue()  # None: no further question
        self._answers: asyncio.Queue[ModelTurn | None] = asyncio.Queue()  # None: no turn or token is left
        self._task: asyncio.Task[Mapping[str, float]] | None = None
        self._is_asking = False
        self._num_answered = 0

    async def ask(self, conversation: Sequence[Message]) -> ModelTurn:
        """Return the model's answer to the whole conversation so far. Raises NoMoreTurns."""
        self._questions.put_nowait(tuple(conversation))
        answer = await self._answers.get()
        if answer is None:
            raise NoMoreTurns
        return answer

    def end_questions(self) -> None:
        """Tell the other side that the environment asks no more and only scores, perhaps after other episodes."""
        self._questions.put_nowait(None)

    async def opening(self) -> tuple[Message, ...]:
        """Begin and return the first question.

        Raises what the environment raises, and UnsupportedEpisode where it asks nothing.
        """
        question = await self._begin()
        if question is None:
            await self.result()
            raise UnsupportedEpisode("the episode ended before the model was asked anything")
        return question

    async def reply(self, turns: Sequence[Message]) -> list[Message] | None:
        """Return the environment's answer to the last of `turns`; None if it has ended the episode.

        Raises UnsupportedEpisode.
        """
        await self._begin_as_announced()
        answer = ModelTurn(text=turns[-1].content, calls=turns[-1].calls, is_cut_off=False)
        question = await self._hand_over(answer)
        if question is None:
            return None
        self._conversation.append(Message(role=ASSISTANT, content=answer.text))
        reply = list(question[len(self._conversation) :])
        if not reply or not all(map(_agrees, self._conversation, question)):
            raise UnsupportedEpisode(
                f"the next question is {_short(question)} after {_short(self._conversation)}: an environment that "
                "changes earlier messages cannot be trained on, since its model would not have seen its own tokens"
            )
        self._conversation += reply
        return reply

    async def score(self, turns: Sequence[Message], *, is_cut_off: bool) -> Mapping[str, float]:
        """Hand over a last turn that has no reply, let the environment end, and return its reward parts."""
        await self._begin_as_announced()
        answers = [turn for turn in turns if turn.role == ASSISTANT]
        if self._is_asking and len(answers) > self._num_answered:
            await self._hand_over(ModelTurn(text=answers[-1].content, calls=answers[-1].calls, is_cut_off=is_cut_off))
        while self._is_asking:
            await self._hand_over(None)
        return await self.result()

    async def result(self) -> Mapping[str, float]:
        assert self._task is not None, "nothing was begun"
        return await asyncio.shield(self._task)

    def close(self) -> None:
        """End the environment's coroutine wherever it is."""
        if self._task is not None:
            self._task.cancel()

    async def _begin(self) -> tuple[Message, ...] | None:
        self._task = asyncio.ensure_future(self._drive(self))
        self._task.add_done_callback(self._ended)
        return await self._next_question()

    async def _begin_as_announced(self) -> None:
        if self._task is not None:
            return
        question = await self.opening()
        if question != self._opening:
            raise UnsupportedEpisode(
                f"the episode begins with {_short(question)}, its problem with {_short(self._opening)}"
            )
        self._conversation = list(question)

    async def _hand_over(self, answer: ModelTurn | None) -> tuple[Message, ...] | None:
        self._num_answered += 1
        self._answers.put_nowait(answer)
        return await self._next_question()

    async def _next_question(self) -> tuple[Message, ...] | None:
        question = await self._questions.get()
        self._is_asking = question is not None
        return question

    def _ended(self, task: "asyncio.Task[Mapping[str, float]]") -> None:
        self._questions.put_nowait(None)
        if not task.cancelled():
            task.exception()  # read here, or asyncio complains that it was never retrieved


def _agrees(message: Message, repeated: Message) -> bool:
    """Whether the environment repeats a message unchanged; it may cut reasoning and the like out of the model's."""
    return message.role == repeated.role and (message.role == ASSISTANT or message.content == repeated.content)


def _short(messages: Sequence[Message]) -> str:
    return str([f"{message.role}: {message.content:.60}" for message in messages[-3:]])
