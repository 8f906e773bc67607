"""An environment that calls the model itself, turned inside out: its questions become replies. Knows no verifiers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from parallm.conversation import ToolCall
from parallm.types import Message

ASSISTANT = "assistant"


class NoMoreTurns(Exception):
    """The environment asks on, but the episode has come to its last turn or token."""


class UnsupportedEpisode(Exception):
    """What the environment wants said cannot be put behind the tokens that are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model has said."""

    text: str
    is_cut_off: bool
    calls: tuple[ToolCall, ...] = ()


Drive: TypeAlias = "Callable[[Exchange], Awaitable[Mapping[str, float]]]"
"""Plays an episode to its end, calls `ask` for each turn of the model, and returns the reward parts."""


class Exchange:
    """One episode: the environment's coroutine asks, the rollout side answers. Lives on the former's event loop."""

    def __init__(self, drive: Drive, opening: Sequence[Message] = ()) -> None:
        self._drive = drive
        self._opening = tuple(opening)
        self._said: list[Message] = []
        self._questions: asyncio.Queue[tuple[Message, ...] | None] = asyncio.Queue()  # None: no more will come
        self._answers: asyncio.Queue[Answer | None] = asyncio.Queue()  # None: nobody answers any more
        self._task: asyncio.Task[Mapping[str, float]] | None = None
        self._is_asking = False
        self._num_answered = 0

    async def ask(self, conversation: Sequence[Message]) -> Answer:
        """What the model says to the whole conversation so far. Raises NoMoreTurns."""
        self._questions.put_nowait(tuple(conversation))
        answer = await self._answers.get()
        if answer is None:
            raise NoMoreTurns
        return answer

    def end_questions(self) -> None:
        """The environment will ask no more and only score, for which it may have to wait for other episodes."""
        self._questions.put_nowait(None)

    async def opening(self) -> tuple[Message, ...]:
        """Begin, and return the first question. Raises what the environment raises, Unfit where it asks nothing."""
        question = await self._begin()
        if question is None:
            await self.result()
            raise UnsupportedEpisode("the episode ended before the model was asked anything")
        return question

    async def reply(self, turns: Sequence[Message]) -> list[Message] | None:
        """What the environment says to the newest turn, the last of `turns`; None where it has ended the episode.

        Raises Unfit.
        """
        await self._begin_as_announced()
        return await self._tell(Answer(text=turns[-1].content, calls=turns[-1].calls, is_cut_off=False))

    async def score(self, turns: Sequence[Message], *, is_cut_off: bool) -> Mapping[str, float]:
        """Hand over a last turn that nobody has replied to, let the environment end, and return its reward parts."""
        await self._begin_as_announced()
        spoken = [turn for turn in turns if turn.role == ASSISTANT]
        if self._is_asking and len(spoken) > self._num_answered:
            await self._hand_over(Answer(text=spoken[-1].content, calls=spoken[-1].calls, is_cut_off=is_cut_off))
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
        self._said = list(question)

    async def _tell(self, answer: Answer) -> list[Message] | None:
        question = await self._hand_over(answer)
        if question is None:
            return None
        self._said.append(Message(role=ASSISTANT, content=answer.text))
        new = list(question[len(self._said) :])
        if not new or not all(map(_agrees, self._said, question)):
            raise UnsupportedEpisode(
                f"the next question is {_short(question)} behind {_short(self._said)}: an environment that changes "
                "what was said cannot be trained on, since its model would not have seen its own tokens"
            )
        self._said += new
        return new

    async def _hand_over(self, answer: Answer | None) -> tuple[Message, ...] | None:
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
            task.exception()  # read here, or asyncio complains of those that nobody waits for


def _agrees(said: Message, repeated: Message) -> bool:
    """Whether the environment repeats a message as it was; it may cut reasoning and the like out of the model's."""
    return said.role == repeated.role and (said.role == ASSISTANT or said.content == repeated.content)


def _short(messages: Sequence[Message]) -> str:
    return str([f"{message.role}: {message.content:.60}" for message in messages[-3:]])
