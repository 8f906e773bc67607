"""The way from domain requests to a response, the same for both endpoints: all at once or as a stream."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypedDict

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import ParallmError, UnknownModel
from parallm.server.catalog import resolved, resolved_to
from parallm.server.connection import json_response, while_connected
from parallm.server.control.trajectory_recorder import TrajectoryRecorder
from parallm.server.interfaces import Engine
from parallm.server.request_limits import SECONDS_PER_LOGPROB
from parallm.server.schemas import ChatAnswer, ChatChunk, CompletionAnswer, PromptTokensDetails, Usage, WeightVersions
from parallm.server.service import Service, Tokenizer, TokenTexts
from parallm.server.streaming import DONE, EventStream, encode_events, failed, merged
from parallm.types import Completion, GenerationRequest, TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseContext:
    """What all chunks of one answer share, and what the client asked to see."""

    answer_id: str
    created: int
    requests: Sequence[GenerationRequest]
    """One for each prompt."""
    tokenizer: Tokenizer
    token_texts: TokenTexts
    """What tokens are called in log-probs."""
    logprobs: bool
    token_ids: bool
    usage_chunk: bool
    recorder: TrajectoryRecorder | None = None
    """Where the client wants the policy to learn from this answer."""
    usage_in_chunks: bool = False
    """Each chunk tells the tokens so far, of all choices together."""
    num_running: int = 0
    """Completions that decoded when the request came."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Echo` that every chunk carries."""

    def choice_index(self, prompt: int, index: int) -> int:
        """Choices are numbered through: all of the first prompt, then all of the second."""
        return prompt * self.requests[prompt].n + index

    def usage(self, num_completion_tokens: int) -> Usage:
        num_prompt_tokens = sum(len(request.prompt_tokens) for request in self.requests)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
        )

    def whole_usage(self, completions: Iterable[Iterable[Completion]]) -> Usage:
        """Of an answer that is complete; `completions` by prompt."""
        groups = [list(group) for group in completions]
        used = self.usage(sum(len(one.tokens) for group in groups for one in group))
        # a prompt counts once, however many completions go on from it
        cached = sum(max((one.num_cached_prompt_tokens for one in group), default=0) for group in groups)
        return used.model_copy(update={"prompt_tokens_details": PromptTokensDetails(cached_tokens=cached)})


class ResponseBuilder(Protocol):
    """One endpoint's way to answer all at once. An object serves one request."""

    @property
    def context(self) -> ResponseContext: ...

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> BaseModel:
        """`completions` by prompt."""
        ...


class StreamBuilder(ResponseBuilder, Protocol):
    """The same in chunks, too."""

    def opening(self, model: str) -> Sequence[BaseModel]:
        """Chunks before the first text."""
        ...

    def text_chunk(self, model: str, prompt: int, event: TokenEvent) -> BaseModel | None:
        """None if there is nothing to tell yet, such as text held back for a stop string."""
        ...

    def final_chunk(self, model: str, prompt: int, completion: Completion) -> BaseModel: ...

    def usage_chunk(self, model: str, usage: Usage) -> BaseModel: ...


class Provenance(TypedDict):
    """Fields of a choice that say how it ended and which weights made it."""

    finish_reason: str | None
    policy_version: int | None
    weight_versions: list[WeightVersions] | None


UNFINISHED = Provenance(finish_reason=None, policy_version=None, weight_versions=None)


def version_of(completion: Completion) -> int | None:
    """The version of the last token."""
    return completion.weight_versions[-1].version if completion.weight_versions else None


def provenance(completion: Completion) -> Provenance:
    return Provenance(
        finish_reason=completion.finish_reason,
        policy_version=version_of(completion),
        weight_versions=weight_versions(completion),
    )


def weight_versions(completion: Completion) -> list[WeightVersions]:
    return [
        WeightVersions(version=str(span.version), start=span.start, end=span.end) for span in completion.weight_versions
    ]


logger = logging.getLogger(__name__)
Events = AsyncGenerator[tuple[int, TokenEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedStream:
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


async def respond_whole(service: Service, http: Request, answers: ResponseBuilder) -> Response:
    """Errors of any prompt fail the whole response and abort the others. Raises ClientDisconnect."""
    requests = answers.context.requests
    completions = await while_connected(http.receive, generate_all(service.engine, requests))
    model = resolved_to(requests[0].model, version_of(completions[0][0]), service.catalog())
    seconds = _seconds_to_write(completions)
    whole = await service.workers.run_if_long(partial(answers.whole, model, completions), seconds=seconds)
    ended = [(prompt, completion) for prompt, group in enumerate(completions) for completion in group]
    (whole,) = _echoing(answers, [_recorded(answers.context, whole, ended)])
    await _written(answers.context)
    return await service.workers.run_if_long(partial(json_response, whole), seconds=seconds)


async def respond_stream(service: Service, http: Request, answers: StreamBuilder) -> Response:
    """Like `start_stream`."""
    begun = await start_stream(service, http, answers.context.requests)
    return EventStream(_encoded(service, answers, begun), begun.events, stall_seconds=service.settings.stall_seconds)


async def start_stream(service: Service, http: Request, requests: Sequence[GenerationRequest]) -> StartedStream:
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
    return StartedStream(model=model, first=first, events=events)


async def generate_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(request)) for request in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def _next(events: Events) -> tuple[int, TokenEvent]:
    return await anext(events)


async def _encoded(service: Service, answers: StreamBuilder, begun: StartedStream) -> AsyncGenerator[bytes, None]:
    """Bytes of the stream; a failure after the first event becomes an event of its own, without `[DONE]`."""
    num_tokens = 0
    ended: list[list[Completion]] = [[] for _ in answers.context.requests]  # by prompt
    model, first = begun.model, begun.first
    try:
        opening = _counting(answers, answers.opening(model), num_tokens)
        num_tokens += _noted(ended, *first)
        chunks = _counting(answers, _chunks(service, answers, model, *first), num_tokens)
        await _written(answers.context)
        yield encode_events(_echoing(answers, [*opening, *chunks]))
        async for prompt, event in begun.events:
            num_tokens += _noted(ended, prompt, event)
            if chunks := _chunks(service, answers, model, prompt, event):
                if event.completion is not None:
                    await _written(answers.context)
                yield encode_events(_echoing(answers, _counting(answers, chunks, num_tokens)))
        if answers.context.usage_chunk:
            yield encode_events(_echoing(answers, [answers.usage_chunk(model, answers.context.whole_usage(ended))]))
        yield DONE
    except ParallmError as error:
        yield failed(error)
    except Exception as error:  # the status is sent already: the log is the only place left for the cause
        logger.exception("the stream %s failed", answers.context.answer_id)
        yield failed(error)


def _noted(ended: list[list[Completion]], prompt: int, event: TokenEvent) -> int:
    """The number of the event's tokens. Its completion, if it has one, is added to those of its prompt."""
    if event.completion is not None:
        ended[prompt].append(event.completion)
    return len(event.tokens)


def _echoing(answers: ResponseBuilder, chunks: Sequence[BaseModel]) -> list[BaseModel]:
    """The same with what the client wants to find its answer again by."""
    echo = answers.context.echo
    return [chunk.model_copy(update=echo) for chunk in chunks] if echo else list(chunks)


def _counting(answers: StreamBuilder, chunks: Sequence[BaseModel], num_tokens: int) -> Sequence[BaseModel]:
    """The same with the tokens until then, where the client wants them in every chunk."""
    if not answers.context.usage_in_chunks:
        return chunks
    return [chunk.model_copy(update={"usage": answers.context.usage(num_tokens)}) for chunk in chunks]


def _chunks(service: Service, answers: StreamBuilder, model: str, prompt: int, event: TokenEvent) -> list[BaseModel]:
    text = answers.text_chunk(model, prompt, event)
    chunks: list[BaseModel] = [] if text is None else [text]
    if event.completion is not None:
        name = answers.context.requests[prompt].model
        model = resolved_to(name, version_of(event.completion), service.catalog())
        final = answers.final_chunk(model, prompt, event.completion)
        chunks.append(_recorded(answers.context, final, [(prompt, event.completion)]))
    return chunks


async def _written(context: ResponseContext) -> None:
    """A client that knows a trajectory's id can rely on it."""
    if context.recorder is not None:
        await context.recorder.written()


def _recorded(context: ResponseContext, answer: BaseModel, ended: Sequence[tuple[int, Completion]]) -> BaseModel:
    """The answer with trajectories' ids, where the client wants them, in the choices of these prompts' completions."""
    if context.recorder is None or not isinstance(answer, CompletionAnswer | ChatAnswer | ChatChunk):
        return answer
    ids: dict[int, str | None] = {}
    for prompt, completion in ended:
        place = context.choice_index(prompt, completion.index)
        ids[place] = context.recorder.record(context.answer_id, prompt, place, completion)
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
    return num_entries * SECONDS_PER_LOGPROB
