"""The way from domain requests to a response, the same for both endpoints: all at once or as a stream."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import ParallmError, UnknownModel
from parallm.server.answer_schemas import ChatAnswer, ChatChunk, CompletionAnswer
from parallm.server.answers import Answers, Head, WholeAnswers, version_of
from parallm.server.catalog import resolved, resolved_to
from parallm.server.connection import json_response, while_connected
from parallm.server.engine_face import Engine
from parallm.server.merge import merged
from parallm.server.service import Service
from parallm.server.sse import DONE, EventStream, encode_events, failed
from parallm.server.worker_pool import SECONDS_A_LOGPROB
from parallm.types import Completion, GenerationRequest, TokenEvent

logger = logging.getLogger(__name__)
Events = AsyncGenerator[tuple[int, TokenEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """A stream whose first event is there. Whoever has it closes `events`."""

    model: str
    first: tuple[int, TokenEvent]
    events: Events


async def on_a_side(
    service: Service,
    requests: Sequence[GenerationRequest],
    answer: Callable[[Sequence[GenerationRequest]], Awaitable[Response]],
) -> Response:
    """`answer` of the requests as a split of their name routes them.

    Where the version that was chosen is unloaded before the engine has begun, another one of the split answers.
    """
    gone = {requests[0].model}
    while True:
        routed = service.routed(requests)
        try:
            return await answer(routed)
        except UnknownModel:
            if routed[0].model in gone:
                raise
            gone.add(routed[0].model)


async def respond_whole(service: Service, http: Request, answers: WholeAnswers) -> Response:
    """Errors of any prompt fail the whole response and abort the others. Raises ClientDisconnect."""
    requests = answers.head.requests
    completions = await while_connected(http.receive, generate_all(service.engine, requests))
    model = resolved_to(requests[0].model, version_of(completions[0][0]), service.catalog())
    seconds = _seconds_to_write(completions)
    whole = await service.workers.run_if_long(partial(answers.whole, model, completions), seconds=seconds)
    ended = [(prompt, completion) for prompt, group in enumerate(completions) for completion in group]
    (whole,) = _echoing(answers, [_recorded(answers.head, whole, ended)])
    await _written(answers.head)
    return await service.workers.run_if_long(partial(json_response, whole), seconds=seconds)


async def respond_stream(service: Service, http: Request, answers: Answers) -> Response:
    """Like `begin_stream`."""
    begun = await begin_stream(service, http, answers.head.requests)
    return EventStream(_encoded(service, answers, begun), begun.events, stall_seconds=service.settings.stall_seconds)


async def begin_stream(service: Service, http: Request, requests: Sequence[GenerationRequest]) -> Beginning:
    """Waits for the first event, so that what is wrong before it becomes an ordinary HTTP error."""
    name = requests[0].model
    before = resolved(name, service.catalog(), service.policies)
    events = merged([service.engine.stream(request) for request in requests])
    try:
        first = await while_connected(http.receive, _next(events))
    except BaseException:
        await events.aclose()
        raise
    # a version published in between may or may not be the one at work; only the last event will tell
    model = before if before == resolved(name, service.catalog(), service.policies) else name
    return Beginning(model=model, first=first, events=events)


async def generate_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(request)) for request in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def _next(events: Events) -> tuple[int, TokenEvent]:
    return await anext(events)


async def _encoded(service: Service, answers: Answers, begun: Beginning) -> AsyncGenerator[bytes, None]:
    """Bytes of the stream; a failure after the first event becomes an event of its own, without `[DONE]`."""
    num_tokens = 0
    ended: list[list[Completion]] = [[] for _ in answers.head.requests]  # by prompt
    model, first = begun.model, begun.first
    try:
        opening = _counting(answers, answers.opening(model), num_tokens)
        num_tokens += _noted(ended, *first)
        chunks = _counting(answers, _chunks(service, answers, model, *first), num_tokens)
        await _written(answers.head)
        yield encode_events(_echoing(answers, [*opening, *chunks]))
        async for prompt, event in begun.events:
            num_tokens += _noted(ended, prompt, event)
            if chunks := _chunks(service, answers, model, prompt, event):
                if event.completion is not None:
                    await _written(answers.head)
                yield encode_events(_echoing(answers, _counting(answers, chunks, num_tokens)))
        if answers.head.usage_chunk:
            yield encode_events(_echoing(answers, [answers.usage_chunk(model, answers.head.whole_usage(ended))]))
        yield DONE
    except ParallmError as error:
        yield failed(error)
    except Exception as error:  # the status is sent already: the log is the only place left for the cause
        logger.exception("the stream %s failed", answers.head.answer_id)
        yield failed(error)


def _noted(ended: list[list[Completion]], prompt: int, event: TokenEvent) -> int:
    """The number of the event's tokens. Its completion, if it has one, is added to those of its prompt."""
    if event.completion is not None:
        ended[prompt].append(event.completion)
    return len(event.tokens)


def _echoing(answers: WholeAnswers, chunks: Sequence[BaseModel]) -> list[BaseModel]:
    """The same with what the client wants to find its answer again by."""
    echo = answers.head.echo
    return [chunk.model_copy(update=echo) for chunk in chunks] if echo else list(chunks)


def _counting(answers: Answers, chunks: Sequence[BaseModel], num_tokens: int) -> Sequence[BaseModel]:
    """The same with the tokens until then, where the client wants them in every chunk."""
    if not answers.head.usage_in_chunks:
        return chunks
    return [chunk.model_copy(update={"usage": answers.head.usage(num_tokens)}) for chunk in chunks]


def _chunks(service: Service, answers: Answers, model: str, prompt: int, event: TokenEvent) -> list[BaseModel]:
    text = answers.text_chunk(model, prompt, event)
    chunks: list[BaseModel] = [] if text is None else [text]
    if event.completion is not None:
        name = answers.head.requests[prompt].model
        model = resolved_to(name, version_of(event.completion), service.catalog())
        final = answers.final_chunk(model, prompt, event.completion)
        chunks.append(_recorded(answers.head, final, [(prompt, event.completion)]))
    return chunks


async def _written(head: Head) -> None:
    """A client that knows a trajectory's id can rely on it."""
    if head.recorder is not None:
        await head.recorder.written()


def _recorded(head: Head, answer: BaseModel, ended: Sequence[tuple[int, Completion]]) -> BaseModel:
    """The answer with trajectories' ids, where the client wants them, in the choices of these prompts' completions."""
    if head.recorder is None or not isinstance(answer, CompletionAnswer | ChatAnswer | ChatChunk):
        return answer
    ids: dict[int, str | None] = {}
    for prompt, completion in ended:
        place = head.choice_index(prompt, completion.index)
        ids[place] = head.recorder.record(head.answer_id, prompt, place, completion)
    choices = [
        choice.model_copy(update={"trajectory_id": ids[choice.index]}) if choice.index in ids else choice
        for choice in answer.choices
    ]
    return answer.model_copy(update={"choices": choices})


def _seconds_to_write(completions: Sequence[Sequence[Completion]]) -> float:
    """An estimate from the number of tokens and of the likely ones beside them."""
    num_entries = sum(
        len(one.tokens)
        + sum(map(len, one.top_logprobs or ()))
        + sum(1 + len(place.top) for place in one.prompt_logprobs or () if place is not None)
        for group in completions
        for one in group
    )
    return num_entries * SECONDS_A_LOGPROB
