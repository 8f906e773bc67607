"""Generation of one answer, whole or as a stream.

Every route that generates calls `respond` with a builder of its wire types. It resolves a split of the model's name to
a version, which no other module does.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from parallm.errors import ParallmError, UnknownModel
from parallm.server.catalog import answered_by, resolved
from parallm.server.connection import json_response, while_connected
from parallm.server.control.trajectory_recorder import TrajectoryRecorder, recorder_for
from parallm.server.engine_gateway import EngineGateway
from parallm.server.failures import DeadlineExceeded, Draining, failure_of
from parallm.server.interfaces import Tokenizer
from parallm.server.openai.completion_schemas import (
    Answer,
    GenerationBody,
    PromptTokensDetails,
    StreamOptions,
    Usage,
    WeightVersions,
)
from parallm.server.request_limits import SECONDS_PER_LOGPROB
from parallm.server.service import Service
from parallm.types import Completion, GenerationRequest, TokenEvent

logger = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
NumberedEvent: TypeAlias = tuple[int, TokenEvent]
"""The number of a prompt and an event of its completions."""
Item = TypeVar("Item")
Events: TypeAlias = AsyncGenerator[NumberedEvent, None]


@dataclass(slots=True, kw_only=True)
class ResponseContext:
    """The id, the requests and the options that all chunks of one answer share."""

    answer_id: str
    body: GenerationBody
    requests: Sequence[GenerationRequest]
    """One for each prompt. `respond` replaces a split name by the version that answers."""
    tokenizer: Tokenizer
    logprobs: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    recorder: TrajectoryRecorder | None = None
    """Takes the completions that the policy is to learn from; set by `respond`."""
    num_running: int = 0
    """Completions that decoded when the request came."""
    on_tokens: Callable[[], None] | None = None
    """Called as tokens come, of whole answers, too; None: those come at once."""

    @property
    def token_text(self) -> Callable[[int], str]:
        """Return the function that names a token in log-probs."""
        return "token_id:{}".format if self.body.return_tokens_as_token_ids else self.tokenizer.token_text

    @property
    def stream_options(self) -> StreamOptions:
        return self.body.stream_options or StreamOptions()

    def choice_index(self, prompt: int, index: int) -> int:
        """Return the number of a choice: all choices of the first prompt come before those of the second."""
        return prompt * self.requests[prompt].n + index

    def usage(self, num_completion_tokens: int) -> Usage:
        num_prompt_tokens = sum(len(request.prompt_tokens) for request in self.requests)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
        )

    def whole_usage(self, completions: Iterable[Iterable[Completion]]) -> Usage:
        """Return the usage of a complete answer; `completions` by prompt."""
        groups = [list(group) for group in completions]
        usage = self.usage(sum(len(completion.tokens) for group in groups for completion in group))
        # a prompt counts once, however many completions go on from it
        cached = sum(max((completion.num_cached_prompt_tokens for completion in group), default=0) for group in groups)
        return usage.model_copy(update={"prompt_tokens_details": PromptTokensDetails(cached_tokens=cached)})


class ResponseBuilder(Protocol):
    """One endpoint's whole answers. An object serves one request."""

    @property
    def context(self) -> ResponseContext: ...

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> BaseModel:
        """Build the answer; `completions` by prompt."""


class StreamBuilder(ResponseBuilder, Protocol):
    """One endpoint's answers, whole and in chunks."""

    def opening(self, model: str) -> Sequence[BaseModel]:
        """Build the chunks before the first text."""

    def text_chunk(self, model: str, prompt: int, event: TokenEvent) -> BaseModel | None:
        """Return None if there is nothing to send yet, such as text held back for a stop string."""

    def final_chunk(self, model: str, prompt: int, completion: Completion) -> BaseModel: ...

    def usage_chunk(self, model: str, usage: Usage) -> BaseModel: ...


class StreamWriter(Protocol):
    """One endpoint's way to write a stream."""

    def encode(self, model: str, first: NumberedEvent, events: Events) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a stream whose `first` event has come."""

    def failed(self, error: Exception) -> bytes:
        """Return the last event of a stream that cannot go on."""


async def respond(
    service: Service, http: Request, builder: ResponseBuilder, writer: StreamWriter | None = None
) -> Response:
    """Generate and answer, as a stream if a writer is given. Raises ClientDisconnect, and what the engine raises.

    If the version that a split has chosen is unloaded before the engine begins, another one of the split answers.
    """
    context = builder.context
    unrouted = context.requests
    tried = {unrouted[0].model}
    while True:
        context.requests = service.splits.routed(unrouted)
        if context.body.collect_trajectory:
            context.recorder = recorder_for(context.body, service, context.requests)
        try:
            if writer is None:
                return await _respond_whole(service, http, builder)
            return await _respond_stream(service, http, context, writer)
        except UnknownModel:
            model = context.requests[0].model
            if model in tried:
                raise
            tried.add(model)


async def _respond_whole(service: Service, http: Request, builder: ResponseBuilder) -> Response:
    """Errors of any prompt fail the whole response and abort the others."""
    context = builder.context
    completions = await while_connected(http.receive, _generate_all(service.gateway, context))
    model = answered_by(context.requests[0].model, completions[0][0], service.catalog(), service.policies)
    seconds = _seconds_to_write(completions)
    answer = await service.workers.run_if_long(partial(builder.whole, model, completions), seconds=seconds)
    ended = [(prompt, completion) for prompt, group in enumerate(completions) for completion in group]
    answer = _recorded(context, answer, ended)
    await _written(context)
    return await service.workers.run_if_long(partial(json_response, answer), seconds=seconds)


async def _respond_stream(service: Service, http: Request, context: ResponseContext, writer: StreamWriter) -> Response:
    """Wait for the first event, so that what is wrong before it becomes an ordinary HTTP error."""
    name = context.requests[0].model
    before = resolved(name, service.catalog(), service.policies)
    events = merged([service.gateway.stream(request) for request in context.requests])
    try:
        first = await while_connected(http.receive, _next(events))
    except BaseException:
        await events.aclose()
        raise
    # a version published in between may or may not be the one at work; only the last event will tell
    model = before if before == resolved(name, service.catalog(), service.policies) else name
    return EventStream(
        writer.encode(model, first, events),
        events,
        name=context.answer_id,
        stall_seconds=service.settings.stall_seconds,
        failed=writer.failed,
    )


async def _generate_all(gateway: EngineGateway, context: ResponseContext) -> list[list[Completion]]:
    on_tokens = context.on_tokens
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    gateway.generate(request) if on_tokens is None else _collected(gateway, request, on_tokens)
                )
                for request in context.requests
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def _collected(
    gateway: EngineGateway, request: GenerationRequest, on_tokens: Callable[[], None]
) -> list[Completion]:
    completions = []
    async with aclosing(gateway.stream(request)) as events:
        async for event in events:
            if event.tokens:
                on_tokens()
            if event.completion is not None:
                completions.append(event.completion)
    return sorted(completions, key=lambda completion: completion.index)


async def _next(events: Events) -> NumberedEvent:
    return await anext(events)


class ChunkStream:
    """Writes one stream as OpenAI's chunks."""

    def __init__(self, service: Service, builder: StreamBuilder) -> None:
        self._service = service
        self._builder = builder
        self._context = builder.context
        self._num_tokens = 0
        self._ended: list[list[Completion]] = [[] for _ in self._context.requests]  # by prompt

    def failed(self, error: Exception) -> bytes:
        return encode_events([failure_of(error).answer])

    async def encode(self, model: str, first: NumberedEvent, events: Events) -> AsyncGenerator[bytes, None]:
        """Yield the bytes, and `[DONE]` unless it fails."""
        context, builder = self._context, self._builder
        chunks = [self._with_usage(chunk) for chunk in builder.opening(model)]
        chunks += self._chunks(model, *first)
        await _written(context)
        yield encode_events(chunks)
        async for prompt, event in events:
            if chunks := self._chunks(model, prompt, event):
                if event.completion is not None:
                    await _written(context)
                yield encode_events(chunks)
        if context.stream_options.include_usage:
            yield encode_events([builder.usage_chunk(model, context.whole_usage(self._ended))])
        yield DONE

    def _chunks(self, model: str, prompt: int, event: TokenEvent) -> list[BaseModel]:
        self._num_tokens += len(event.tokens)
        text = self._builder.text_chunk(model, prompt, event)
        chunks: list[BaseModel] = [] if text is None else [text]
        if event.completion is not None:
            self._ended[prompt].append(event.completion)
            name = self._context.requests[prompt].model
            model = answered_by(name, event.completion, self._service.catalog(), self._service.policies)
            final = self._builder.final_chunk(model, prompt, event.completion)
            chunks.append(_recorded(self._context, final, [(prompt, event.completion)]))
        return [self._with_usage(chunk) for chunk in chunks]

    def _with_usage(self, chunk: BaseModel) -> BaseModel:
        if not self._context.stream_options.continuous_usage_stats:
            return chunk
        return chunk.model_copy(update={"usage": self._context.usage(self._num_tokens)})


async def _written(context: ResponseContext) -> None:
    """Wait until a client that knows a trajectory's id can rely on it."""
    if context.recorder is not None:
        await context.recorder.written()


def _recorded(context: ResponseContext, answer: BaseModel, ended: Sequence[tuple[int, Completion]]) -> BaseModel:
    """Record completions, by prompt, to learn from. Return the answer with the ids of their trajectories."""
    if context.recorder is None or not isinstance(answer, Answer):
        return answer
    ids: dict[int, str | None] = {}
    for prompt, completion in ended:
        index = context.choice_index(prompt, completion.index)
        ids[index] = context.recorder.record(context.answer_id, prompt, index, completion)
    choices = [
        choice.model_copy(update={"trajectory_id": ids[choice.index]}) if choice.index in ids else choice
        for choice in answer.choices
    ]
    return answer.model_copy(update={"choices": choices})


def _seconds_to_write(completions: Sequence[Sequence[Completion]]) -> float:
    """Estimate the time from the number of tokens and of the likely ones beside them."""
    num_entries = sum(
        len(completion.tokens)
        + sum(map(len, completion.top_logprobs or ()))
        + sum(1 + len(logprob.top) for logprob in completion.prompt_logprobs or () if logprob is not None)
        for group in completions
        for completion in group
    )
    return num_entries * SECONDS_PER_LOGPROB


def weight_versions(completion: Completion) -> list[WeightVersions]:
    return [
        WeightVersions(version=str(span.version), start=span.start, end=span.end) for span in completion.weight_versions
    ]


def encode_events(chunks: Iterable[BaseModel]) -> bytes:
    return b"".join(b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n" for chunk in chunks)


class EventStream(Response):
    """Sends `events` until they end, the client leaves or stops reading, or the request's time is over.

    Then it closes `events` and `source`, which `events` reads: a generator that never started closes nothing itself.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: AsyncGenerator[object, None],
        *,
        name: str,
        stall_seconds: float,
        failed: Callable[[Exception], bytes],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._source = source
        self._name = name
        self._stall_seconds = stall_seconds
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await while_connected(receive, self._send_events(send))
        except (DeadlineExceeded, Draining) as error:
            with suppress(ClientDisconnect):
                await self._send(send, self._failed(error), is_last=True)
        except ClientDisconnect:
            pass  # no client is left to answer
        finally:
            await self._events.aclose()
            await self._source.aclose()

    async def _send_events(self, send: Send) -> None:
        """Send events to the end. A failure becomes the last one."""
        while True:
            try:
                event = await anext(self._events, None)
            except Exception as error:
                if not isinstance(error, ParallmError):  # the status is sent already: the log alone can hold the cause
                    logger.exception("the stream %s failed", self._name)
                event = self._failed(error)
            if event is None:
                break
            await self._send(send, event)
        await self._send(send, b"", is_last=True)

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        """Wait while the client's buffers are full. Raises ClientDisconnect if it takes nothing for too long."""
        try:
            async with asyncio.timeout(self._stall_seconds):
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        except TimeoutError as error:
            raise ClientDisconnect from error


async def merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield the items of all streams as they come, each with the number of its stream.

    The first error of any stream is raised here. Closing this closes all streams.
    """
    if len(streams) == 1:  # no queue, so that the stream is asked only when its reader wants more
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item] | int] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(number, stream, queue)) for number, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            message = await queue.get()
            if isinstance(message, int):
                await tasks[message]  # raises what ended the stream
                num_open -= 1
            else:
                yield message
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(number: int, stream: AsyncGenerator[Item, None], queue: asyncio.Queue[tuple[int, Item] | int]) -> None:
    """Move the items of one stream into `queue`, and at its end, well or not, its number."""
    try:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait((number, item))
    finally:
        queue.put_nowait(number)
