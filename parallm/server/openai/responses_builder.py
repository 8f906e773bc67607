"""Answers of `POST /v1/responses`: one completion as a list of items, whole and as events."""

import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Literal

from parallm.conversation import Section, ToolCall
from parallm.server.catalog import answered_by, version_of
from parallm.server.failures import failure_of
from parallm.server.generation import Events, NumberedEvent, ResponseContext
from parallm.server.openai.output_parser import MessageParser, MessagePart, OutputParsing, parse_whole
from parallm.server.openai.responses_schemas import (
    IncompleteDetails,
    InputDetails,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseAnswer,
    ResponseBody,
    ResponseEvent,
    ResponseUsage,
    Status,
)
from parallm.server.service import Service
from parallm.types import Completion, TokenEvent

Kind = Literal["reasoning", "message"]
PREFIXES: Mapping[Kind, str] = {"reasoning": "rs", "message": "msg"}
"""Beginnings of ids."""
OWN = {"model", "reasoning", "store", "text"}
REPEATED = ResponseBody.model_fields.keys() & ResponseAnswer.model_fields.keys() - OWN
"""Fields of the request that its answer repeats as they are."""


class ResponsesBuilder:
    def __init__(self, context: ResponseContext, parsing: OutputParsing, body: ResponseBody) -> None:
        self.context = context
        self.parsing = parsing
        self._body = body

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> ResponseAnswer:
        ((completion,),) = completions
        part = parse_whole(MessageParser(self.context.tokenizer.output, self.parsing), completion.text)
        return self.answer(model, _items(part, _status(completion)), completion)

    def answer(self, model: str, output: list[OutputItem], completion: Completion | None = None) -> ResponseAnswer:
        """Build the answer of a `completion`, or while there is none the answer in progress."""
        body = self._body
        is_cut = completion is not None and completion.finish_reason == "length"
        return ResponseAnswer(
            id=self.context.answer_id,
            object="response",
            created_at=self.context.created,
            status="in_progress" if completion is None else _status(completion),
            error=None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
            model=model,
            output=output,
            previous_response_id=None,
            reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            store=False,
            text={"format": body.text.format.model_dump(by_alias=True, exclude_unset=True)},
            truncation="disabled",
            usage=None if completion is None else self._usage(completion, output),
            policy_version=None if completion is None else version_of(completion),
            **body.model_dump(include=set(REPEATED)),
        )

    def _usage(self, completion: Completion, output: list[OutputItem]) -> ResponseUsage:
        reasoning = "".join(part.text for item in output if isinstance(item, OutputReasoning) for part in item.content)
        num_reasoning = len(self.context.tokenizer.encode(reasoning, add_special=False)) if reasoning else 0
        tokens = self.context.usage(len(completion.tokens))
        return ResponseUsage(
            input_tokens=tokens.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=completion.num_cached_prompt_tokens),
            output_tokens=tokens.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=num_reasoning),
            total_tokens=tokens.total_tokens,
        )


def _status(completion: Completion) -> Status:
    """Return `incomplete` for an aborted answer, too; OpenAI has no reason of this kind."""
    return "incomplete" if completion.finish_reason in ("length", "abort") else "completed"


def _items(part: MessagePart, status: Status) -> list[OutputItem]:
    """Return the items of an answer; without any text or call, an empty message."""
    items: list[OutputItem] = []
    pieces = part.pieces or [("text", "")]
    for place, piece in enumerate(pieces):
        if isinstance(piece, ToolCall):
            items.append(_call_item(_new_id("fc"), piece, "completed"))
            continue
        kind = _kind_of(piece[0])
        own = status if place == len(pieces) - 1 else "completed"  # only the last text can be cut
        items.append(_text_item(kind, _new_id(PREFIXES[kind]), own, piece[1]))
    return items


def _kind_of(section: Section) -> Kind:
    return "reasoning" if section == "reasoning" else "message"


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _part(kind: Kind, text: str) -> OutputText | ReasoningText:
    if kind == "message":
        return OutputText(type="output_text", text=text, annotations=[], logprobs=[])
    return ReasoningText(type="reasoning_text", text=text)


def _text_item(kind: Kind, item_id: str, status: Status, text: str | None = None) -> OutputMessage | OutputReasoning:
    content: list[Any] = [] if text is None else [_part(kind, text)]
    if kind == "message":
        return OutputMessage(type="message", id=item_id, status=status, role="assistant", content=content)
    return OutputReasoning(type="reasoning", id=item_id, status=status, summary=[], content=content)


def _call_item(item_id: str, call: ToolCall, status: Status) -> OutputCall:
    return OutputCall(
        type="function_call",
        id=item_id,
        status=status,
        call_id=call.call_id or f"call_{uuid.uuid4().hex[:24]}",
        name=call.name,
        arguments=call.arguments,
    )


class ResponsesStream:
    """Writes one answer as OpenAI's events. An item opens with its first text and closes when another item opens."""

    def __init__(self, service: Service, builder: ResponsesBuilder) -> None:
        self._service = service
        self._builder = builder
        self._parser = MessageParser(builder.context.tokenizer.output, builder.parsing)
        self._number = 0
        self._items: list[OutputItem] = []
        self._kind: Kind | None = None
        self._item_id = ""
        self._text = ""

    async def encode(self, model: str, first: NumberedEvent, events: Events) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of the answer."""
        answer = self._builder.answer(model, [])
        opening = [self._event("response.created", response=answer)]
        opening.append(self._event("response.in_progress", response=answer))
        yield _encode([*opening, *self._events(first[1])])
        async for _, event in events:
            if written := list(self._events(event)):
                yield _encode(written)

    def failed(self, error: Exception) -> bytes:
        """Return the last event of a stream that cannot go on."""
        detail = failure_of(error).answer.error
        return _encode([self._event("error", code=detail.code, message=detail.message, param=detail.param)])

    def _events(self, event: TokenEvent) -> Iterator[ResponseEvent]:
        yield from self._part_events(self._parser.read(event.text))
        if (completion := event.completion) is None:
            return
        yield from self._part_events(self._parser.finish())
        if self._kind is None and not self._items:
            yield from self._open("message")
        yield from self._close(_status(completion))
        name = self._builder.context.requests[0].model
        model = answered_by(name, completion, self._service.catalog(), self._service.policies)
        answer = self._builder.answer(model, self._items, completion)
        yield self._event(f"response.{answer.status}", response=answer)

    def _part_events(self, part: MessagePart) -> Iterator[ResponseEvent]:
        for piece in part.pieces:
            if isinstance(piece, ToolCall):
                yield from self._close()
                yield from self._call_events(piece)
            else:
                yield from self._text_events(_kind_of(piece[0]), piece[1])

    def _text_events(self, kind: Kind, text: str) -> Iterator[ResponseEvent]:
        if self._kind != kind:
            yield from self._close()
            yield from self._open(kind)
        self._text += text
        yield self._text_event("delta", delta=text)

    def _open(self, kind: Kind) -> Iterator[ResponseEvent]:
        self._kind, self._text = kind, ""
        self._item_id = _new_id(PREFIXES[kind])
        item = _text_item(kind, self._item_id, "in_progress")
        yield self._event("response.output_item.added", output_index=len(self._items), item=item)
        yield self._in_item("response.content_part.added", part=_part(kind, ""))

    def _close(self, status: Status = "completed") -> Iterator[ResponseEvent]:
        if (kind := self._kind) is None:
            return
        yield self._text_event("done", text=self._text)
        yield self._in_item("response.content_part.done", part=_part(kind, self._text))
        self._kind = None
        yield self._done(_text_item(kind, self._item_id, status, self._text))

    def _call_events(self, call: ToolCall) -> Iterator[ResponseEvent]:
        """Yield a complete call: there is one delta."""
        item = _call_item(_new_id("fc"), call, "completed")
        index = {"output_index": len(self._items)}
        empty = item.model_copy(update={"arguments": "", "status": "in_progress"})
        yield self._event("response.output_item.added", item=empty, **index)
        position = index | {"item_id": item.id}
        yield self._event("response.function_call_arguments.delta", delta=item.arguments, **position)
        yield self._event("response.function_call_arguments.done", name=item.name, arguments=item.arguments, **position)
        yield self._done(item)

    def _done(self, item: OutputItem) -> ResponseEvent:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _text_event(self, what: str, **fields: object) -> ResponseEvent:
        if self._kind == "message":
            return self._in_item(f"response.output_text.{what}", **fields, logprobs=[])
        return self._in_item(f"response.reasoning_text.{what}", **fields)

    def _in_item(self, kind: str, **fields: object) -> ResponseEvent:
        return self._event(kind, item_id=self._item_id, output_index=len(self._items), content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> ResponseEvent:
        self._number += 1
        return ResponseEvent(type=kind, sequence_number=self._number - 1, **fields)


def _encode(events: list[ResponseEvent]) -> bytes:
    return b"".join(
        b"event: " + event.type.encode() + b"\ndata: " + event.model_dump_json(exclude_unset=True).encode() + b"\n\n"
        for event in events
    )
