"""The text of a model as a message: reasoning, tool calls and content, split as the text comes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from parallm.conversation import Section, ToolCall
from parallm.server.interfaces import OutputFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParsing:
    """Rules to parse the text of one answer."""

    begins_in_reasoning: bool = False
    tools: Sequence[Mapping[str, object]] = ()
    """Tools that may be called; without tools, no text is taken for a call."""
    max_calls: int | None = None
    answer: Literal["message", "arguments", "calls"] = "message"
    """The part after the reasoning: a message with the model's own marks, or JSON that a grammar enforces, which is the
    arguments of `called` or a list of calls."""
    called: str | None = None


@dataclass(slots=True)
class MessagePart:
    """Texts and calls that a piece of output adds to a message."""

    pieces: list[tuple[Section, str] | ToolCall] = field(default_factory=list)
    """Text of a section, and calls, in the order in which they were written."""

    def add(self, section: Section, text: str) -> None:
        match self.pieces:
            case [*_, (last, before)] if last == section:
                self.pieces[-1] = section, before + text
            case _ if text:
                self.pieces.append((section, text))

    @property
    def content(self) -> str:
        return self._text("text")

    @property
    def reasoning(self) -> str:
        return self._text("reasoning")

    @property
    def calls(self) -> list[ToolCall]:
        return [piece for piece in self.pieces if isinstance(piece, ToolCall)]

    def _text(self, section: Section) -> str:
        return "".join(piece[1] for piece in self.pieces if not isinstance(piece, ToolCall) and piece[0] == section)

    def without_content(self) -> "MessagePart":
        return MessagePart([piece for piece in self.pieces if isinstance(piece, ToolCall) or piece[0] != "text"])

    def __bool__(self) -> bool:
        return bool(self.pieces)


class MessageParser:
    """Parses the text of one choice.

    White space beside a mark belongs to the notation and is dropped. Text between the marks of a call that is none
    becomes content, marks included. JSON of forced calls is held back to the end; text that ends inside the first of
    several calls stays content.
    """

    def __init__(self, output: OutputFormat, parsing: OutputParsing) -> None:
        self._output = output
        self._parsing = parsing
        self._reader = output.reader(begins_in_reasoning=parsing.begins_in_reasoning, has_tools=bool(parsing.tools))
        self._section: Section = "reasoning" if parsing.begins_in_reasoning else "text"
        self._is_at_mark = parsing.begins_in_reasoning
        self._has_marks = bool(output.marks)
        self._held = ""  # white space that may stand before a mark
        self._call = ""
        self._forced = ""  # JSON of forced calls
        self.num_calls = 0

    def read(self, text: str) -> MessagePart:
        part = MessagePart()
        for section, piece in self._reader.read(text):
            self._take(section, piece, part)
        return self._without_forced(part)

    def finish(self) -> MessagePart:
        part = MessagePart()
        for section, piece in self._reader.finish():
            self._take(section, piece, part)
        if self._section == "tool":
            self._end_call(part, is_closed=False)
        elif self._section == "text" and not self.num_calls:
            part.add("text", self._held)
        if self._parsing.answer != "message":
            part = self._without_forced(part)
            calls = _forced_calls(self._forced, self._parsing.called)
            part.pieces += calls
            if not calls:
                part.add("text", self._forced)
            self.num_calls = len(calls)
        return part

    def _without_forced(self, part: MessagePart) -> MessagePart:
        if self._parsing.answer == "message":
            return part
        self._forced += part.content
        return part.without_content()

    def _take(self, section: Section, piece: str, part: MessagePart) -> None:
        if section != self._section:
            if self._section == "tool":
                self._end_call(part, is_closed=True)
            self._section, self._is_at_mark, self._held = section, True, ""
        if section == "tool":
            self._call += piece
            return
        piece = self._held + piece
        if self._is_at_mark:
            piece = piece.lstrip()
        shown = piece.rstrip() if self._has_marks else piece
        self._held = piece[len(shown) :]
        self._is_at_mark = self._is_at_mark and not piece
        part.add(section, shown)

    def _end_call(self, part: MessagePart, *, is_closed: bool) -> None:
        text, self._call = self._call, ""
        calls = self._output.parse_calls(text, self._parsing.tools)
        if not calls:
            start, end = self._output.tool_marks or ("", "")
            part.add("text", start + text + (end if is_closed else ""))
        if self._parsing.max_calls is not None:
            calls = calls[: max(0, self._parsing.max_calls - self.num_calls)]
        self.num_calls += len(calls)
        part.pieces += calls


def parse_whole(parser: MessageParser, text: str) -> MessagePart:
    whole = parser.read(text)
    for piece in parser.finish().pieces:
        if isinstance(piece, ToolCall):
            whole.pieces.append(piece)
        else:
            whole.add(*piece)
    return whole


def _forced_calls(text: str, called: str | None) -> list[ToolCall]:
    """Return the call of `called` with these arguments, or else the complete calls of a JSON list."""
    if called is not None:
        return [ToolCall(name=called, arguments=text)] if text else []
    calls: list[ToolCall] = []
    decoder, start = json.JSONDecoder(), len("[")
    while True:
        try:
            call, end = decoder.raw_decode(text, start)
        except ValueError:
            return calls
        calls.append(ToolCall(name=call["name"], arguments=json.dumps(call["arguments"], ensure_ascii=False)))
        start = end + len(", ")
