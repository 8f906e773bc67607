"""The stream of `POST /v1/responses`: OpenAI's events, each with its number."""

import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Literal

from parallm.conversation import ToolCall
from parallm.errors import ParallmError
from parallm.server.answers import version_of
from parallm.server.catalog import resolved_to
from parallm.server.failures import failure_of
from parallm.server.generation import Beginning
from parallm.server.openai.forced_calls import new_reader
from parallm.server.openai.message_reader import MessagePart
from parallm.server.openai.response_answer_schemas import OutputItem, ResponseEvent, Status
from parallm.server.openai.response_answers import (
    ResponseAnswers,
    call_item,
    message_item,
    new_id,
    reasoning_item,
    status_of,
    text_part,
)
from parallm.server.openai.response_schemas import ReasoningText
from parallm.server.service import Service
from parallm.types import TokenEvent

logger = logging.getLogger(__name__)
Kind = Literal["reasoning", "message"]


class ResponseEvents:
    """Makes the events of one answer. Items are opened when their first text comes and closed when another begins."""

    def __init__(self, service: Service, answers: ResponseAnswers) -> None:
        self._service = service
        self._answers = answers
        self._reader = new_reader(answers.head.tokenizer.output, answers.reading)
        self._number = 0
        self._items: list[OutputItem] = []
        self._kind: Kind | None = None
        self._item_id = ""
        self._text = ""

    async def encoded(self, begun: Beginning) -> AsyncGenerator[bytes, None]:
        """Bytes of the stream. A failure after the first event becomes an event `error`, the last one."""
        try:
            answer = self._answers.begun(begun.model)
            opening = [self._event("response.created", response=answer)]
            opening.append(self._event("response.in_progress", response=answer))
            yield _encode([*opening, *self._told(begun.first[1])])
            async for _, event in begun.events:
                if events := list(self._told(event)):
                    yield _encode(events)
        except ParallmError as error:
            yield self.failed(error)
        except Exception as error:  # the status is sent already: the log is the only place left for the cause
            logger.exception("the stream %s failed", self._answers.head.answer_id)
            yield self.failed(error)

    def failed(self, error: Exception) -> bytes:
        """The last event of a stream that cannot go on."""
        detail = failure_of(error).answer.error
        return _encode([self._event("error", code=detail.code, message=detail.message, param=detail.param)])

    def _told(self, event: TokenEvent) -> Iterator[ResponseEvent]:
        yield from self._added(self._reader.read(event.text))
        if (completion := event.completion) is None:
            return
        yield from self._added(self._reader.finish())
        if self._kind is None and not self._items:
            yield from self._open("message")
        yield from self._close(status_of(completion))
        name = self._answers.head.requests[0].model
        model = resolved_to(name, version_of(completion), self._service.catalog())
        answer = self._answers.finished(model, completion, self._items)
        yield self._event(f"response.{answer.status}", response=answer)

    def _added(self, part: MessagePart) -> Iterator[ResponseEvent]:
        if part.reasoning:
            yield from self._more("reasoning", part.reasoning)
        if part.content:
            yield from self._more("message", part.content)
        for call in part.calls:
            yield from self._close()
            yield from self._called(call)

    def _more(self, kind: Kind, text: str) -> Iterator[ResponseEvent]:
        if self._kind != kind:
            yield from self._close()
            yield from self._open(kind)
        self._text += text
        if kind == "message":
            yield self._in_item("response.output_text.delta", delta=text, logprobs=[])
        else:
            yield self._in_item("response.reasoning_text.delta", delta=text)

    def _open(self, kind: Kind) -> Iterator[ResponseEvent]:
        self._kind, self._text = kind, ""
        self._item_id = new_id("msg" if kind == "message" else "rs")
        make = message_item if kind == "message" else reasoning_item
        item = make(self._item_id, None, "in_progress")
        yield self._event("response.output_item.added", output_index=len(self._items), item=item)
        yield self._in_item("response.content_part.added", part=self._part(""))

    def _close(self, status: Status = "completed") -> Iterator[ResponseEvent]:
        if self._kind is None:
            return
        if self._kind == "message":
            yield self._in_item("response.output_text.done", text=self._text, logprobs=[])
        else:
            yield self._in_item("response.reasoning_text.done", text=self._text)
        yield self._in_item("response.content_part.done", part=self._part(self._text))
        make = message_item if self._kind == "message" else reasoning_item
        self._kind = None
        yield self._done(make(self._item_id, self._text, status))

    def _called(self, call: ToolCall) -> Iterator[ResponseEvent]:
        """A call is told when it is complete, so there is one delta."""
        item = call_item(new_id("fc"), call, "completed")
        place = {"output_index": len(self._items)}
        empty = item.model_copy(update={"arguments": "", "status": "in_progress"})
        yield self._event("response.output_item.added", item=empty, **place)
        place_in = place | {"item_id": item.id}
        yield self._event("response.function_call_arguments.delta", delta=item.arguments, **place_in)
        yield self._event("response.function_call_arguments.done", name=item.name, arguments=item.arguments, **place_in)
        yield self._done(item)

    def _done(self, item: OutputItem) -> ResponseEvent:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _part(self, text: str) -> object:
        return text_part(text) if self._kind == "message" else ReasoningText(type="reasoning_text", text=text)

    def _in_item(self, kind: str, **fields: object) -> ResponseEvent:
        return self._event(kind, item_id=self._item_id, output_index=len(self._items), content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> ResponseEvent:
        event = ResponseEvent(type=kind, sequence_number=self._number)
        self._number += 1
        return event.model_copy(update=fields)


def _encode(events: list[ResponseEvent]) -> bytes:
    return b"".join(
        b"event: " + event.type.encode() + b"\ndata: " + event.model_dump_json(exclude_unset=True).encode() + b"\n\n"
        for event in events
    )
