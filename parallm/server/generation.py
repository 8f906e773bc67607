"""Generation of one answer, whole or as a stream.

Every route that generates calls `respond` with a builder of its wire types. It resolves a split of the model's name to
a version, which no other module does.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias, TypedDict

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import UnknownModel
from parallm.server.catalog import answered_by, resolved, version_of
from parallm.server.connection import json_response, while_connected
from parallm.server.control.trajectory_recorder import TrajectoryRecorder, recorder_for
from parallm.server.engine_gateway import EngineGateway
from parallm.server.interfaces import Tokenizer
from parallm.server.openai.completion_schemas import Answer, GenerationBody, PromptTokensDetails, Usage, WeightVersions
from parallm.server.request_limits import SECONDS_PER_LOGPROB
from parallm.server.service import Service
from parallm.server.streaming import DONE, EventStream, encode_events, failed, merged
from parallm.types import Completion, GenerationRequest, TokenEvent

Events: TypeAlias = AsyncGenerator[tuple[int, TokenEvent], None]


@dataclass(slots=True, kw_only=True)
class ResponseContext:
    """The id, the requests and the options that all chunks of one answer share."""

    answer_id: str
    body: GenerationBody
    requests: Sequence[GenerationRequest]
    """One for each prompt. `respond` replaces a split name by the version that answers."""
    tokenizer: Tokenizer
    token_text: Callable[[int], str]
    """Name of a token in log-probs."""
    logprobs: bool
    created: int = field(default_factory=lambda: int(time.time()))
    recorder: TrajectoryRecorder | None = None
    """Takes the completions that the policy is to learn from; set by `respond`."""
    num_running: int = 0
    """Completions that decoded when the request came."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Echo` that every chunk carries."""

    @property
    def token_ids(self) -> bool:
        return self.body.return_token_ids

    @property
    def usage_chunk(self) -> bool:
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    @property
    def usage_in_chunks(self) -> bool:
        """Each chunk holds the number of tokens so far, of all choices together."""
        return self.body.stream_options is not None and self.body.stream_options.continuous_usage_stats

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


class Provenance(TypedDict):
    """Fields of a choice that say how it ended and which weights made it."""

    finish_reason: str | None
    policy_version: int | None
    weight_versions: list[WeightVersions] | None


UNFINISHED = Provenance(finish_reason=None, policy_version=None, weight_versions=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedStream:
    """A stream whose first event has come. Its holder closes `events`."""

    model: str
    first: tuple[int, TokenEvent]
    events: Events


class StreamWriter(Protocol):
    """One endpoint's way to write a stream."""

    def encode(self, started: StartedStream) -> AsyncGenerator[bytes, None]: ...

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
    completions = await while_connected(http.receive, _generate_all(service.gateway, context.requests))
    model = answered_by(context.requests[0].model, completions[0][0], service.catalog())
    seconds = _seconds_to_write(completions)
    answer = await service.workers.run_if_long(partial(builder.whole, model, completions), seconds=seconds)
    ended = [(prompt, completion) for prompt, group in enumerate(completions) for completion in group]
    answer = _echoing(context, _recorded(context, answer, ended))
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
    started = StartedStream(model=model, first=first, events=events)
    return EventStream(
        writer.encode(started),
        events,
        name=context.answer_id,
        stall_seconds=service.settings.stall_seconds,
        failed=writer.failed,
    )


async def _generate_all(gateway: EngineGateway, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(gateway.generate(request)) for request in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def _next(events: Events) -> tuple[int, TokenEvent]:
    return await anext(events)


class ChunkStream:
    """Writes one stream as OpenAI's chunks."""

    def __init__(self, service: Service, builder: StreamBuilder) -> None:
        self._service = service
        self._builder = builder
        self._context = builder.context
        self._num_tokens = 0
        self._ended: list[list[Completion]] = [[] for _ in self._context.requests]  # by prompt

    failed = staticmethod(failed)

    async def encode(self, started: StartedStream) -> AsyncGenerator[bytes, None]:
        """Yield the bytes, and `[DONE]` unless it fails."""
        context, builder = self._context, self._builder
        chunks = [self._with_extras(chunk) for chunk in builder.opening(started.model)]
        chunks += self._chunks(started.model, *started.first)
        await _written(context)
        yield encode_events(chunks)
        async for prompt, event in started.events:
            if chunks := self._chunks(started.model, prompt, event):
                if event.completion is not None:
                    await _written(context)
                yield encode_events(chunks)
        if context.usage_chunk:
            chunk = builder.usage_chunk(started.model, context.whole_usage(self._ended))
            yield encode_events([_echoing(context, chunk)])
        yield DONE

    def _chunks(self, model: str, prompt: int, event: TokenEvent) -> list[BaseModel]:
        self._num_tokens += len(event.tokens)
        text = self._builder.text_chunk(model, prompt, event)
        chunks: list[BaseModel] = [] if text is None else [text]
        if event.completion is not None:
            self._ended[prompt].append(event.completion)
            name = self._context.requests[prompt].model
            model = answered_by(name, event.completion, self._service.catalog())
            final = self._builder.final_chunk(model, prompt, event.completion)
            chunks.append(_recorded(self._context, final, [(prompt, event.completion)]))
        return [self._with_extras(chunk) for chunk in chunks]

    def _with_extras(self, chunk: BaseModel) -> BaseModel:
        if self._context.usage_in_chunks:
            chunk = chunk.model_copy(update={"usage": self._context.usage(self._num_tokens)})
        return _echoing(self._context, chunk)


async def _written(context: ResponseContext) -> None:
    """Wait until a client that knows a trajectory's id can rely on it."""
    if context.recorder is not None:
        await context.recorder.written()


def _echoing(context: ResponseContext, chunk: BaseModel) -> BaseModel:
    """Return the chunk with the fields by which the client finds its answer again."""
    return chunk.model_copy(update=context.echo) if context.echo else chunk


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


def provenance(completion: Completion, *, has_calls: bool = False) -> Provenance:
    calls = has_calls and completion.finish_reason == "stop"
    return Provenance(
        finish_reason="tool_calls" if calls else completion.finish_reason,
        policy_version=version_of(completion),
        weight_versions=weight_versions(completion),
    )


def weight_versions(completion: Completion) -> list[WeightVersions]:
    return [
        WeightVersions(version=str(span.version), start=span.start, end=span.end) for span in completion.weight_versions
    ]
