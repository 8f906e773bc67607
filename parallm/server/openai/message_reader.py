"""The text of a model as a message: reasoning, tool calls and content, told apart as it comes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from parallm.conversation import Section, ToolCall
from parallm.server.service import OutputFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the text of an answer is to be understood."""

    begins_in_reasoning: bool = False
    tools: Sequence[Mapping[str, object]] = ()
    """What may be called; without tools, nothing is taken for a call."""
    max_calls: int | None = None
    answer: Literal["message", "arguments", "calls"] = "message"
    """What stands behind the reasoning: a message with the model's own marks, or JSON that a grammar has made of it.

    That is of the arguments of `called` or of a list of calls."""
    called: str | None = None


@dataclass(slots=True, kw_only=True)
class MessagePart:
    """What a piece of text adds to a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class MessageReader(Protocol):
    """One choice's way from text to a message."""

    num_calls: int

    def read(self, text: str) -> MessagePart: ...

    def finish(self) -> MessagePart:
        """What was held back."""
        ...


def read_whole(reader: MessageReader, text: str) -> MessagePart:
    first, rest = reader.read(text), reader.finish()
    return MessagePart(
        content=first.content + rest.content,
        reasoning=first.reasoning + rest.reasoning,
        calls=first.calls + rest.calls,
    )


class MarkedMessageReader:
    """Reads a model that marks its reasoning and its calls.

    White space beside a mark belongs to the notation and is dropped. What stands between the marks of a call and is
    none becomes content, marks included.
    """

    def __init__(self, output: OutputFormat, reading: Reading) -> None:
        self._output = output
        self._reading = reading
        self._reader = output.reader(begins_in_reasoning=reading.begins_in_reasoning, has_tools=bool(reading.tools))
        self._section: Section = "reasoning" if reading.begins_in_reasoning else "text"
        self._is_at_mark = reading.begins_in_reasoning
        self._has_marks = bool(output.marks)
        self._held = ""  # white space that may stand before a mark
        self._call = ""
        self.num_calls = 0

    def read(self, text: str) -> MessagePart:
        part = MessagePart()
        for section, piece in self._reader.read(text):
            self._take(section, piece, part)
        return part

    def finish(self) -> MessagePart:
        part = MessagePart()
        for section, piece in self._reader.finish():
            self._take(section, piece, part)
        if self._section == "tool":
            self._end_call(part, is_closed=False)
        elif self._section == "text" and not self.num_calls:
            part.content += self._held
        return part

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
        if section == "text":
            part.content += shown
        else:
            part.reasoning += shown

    def _end_call(self, part: MessagePart, *, is_closed: bool) -> None:
        text, self._call = self._call, ""
        calls = self._output.parse_calls(text, self._reading.tools)
        if not calls:
            start, end = self._output.tool_marks or ("", "")
            part.content += start + text + (end if is_closed else "")
        if self._reading.max_calls is not None:
            calls = calls[: max(0, self._reading.max_calls - self.num_calls)]
        self.num_calls += len(calls)
        part.calls += calls
