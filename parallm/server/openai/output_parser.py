"""The text of a model as a message: reasoning, tool calls and content, told apart as it comes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from parallm.conversation import GrammarSource, Section, ToolCall
from parallm.errors import InvalidRequest
from parallm.server.openai.chat_schemas import ChatBody, NamedTool, Tool
from parallm.server.service import OutputFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParsing:
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


class MessageParser(Protocol):
    """One choice's way from text to a message."""

    num_calls: int

    def read(self, text: str) -> MessagePart: ...

    def finish(self) -> MessagePart:
        """What was held back."""
        ...


def parse_whole(reader: MessageParser, text: str) -> MessagePart:
    first, rest = reader.read(text), reader.finish()
    return MessagePart(
        content=first.content + rest.content,
        reasoning=first.reasoning + rest.reasoning,
        calls=first.calls + rest.calls,
    )


class MarkedMessageParser:
    """Reads a model that marks its reasoning and its calls.

    White space beside a mark belongs to the notation and is dropped. What stands between the marks of a call and is
    none becomes content, marks included.
    """

    def __init__(self, output: OutputFormat, parsing: OutputParsing) -> None:
        self._output = output
        self._reading = parsing
        self._reader = output.reader(begins_in_reasoning=parsing.begins_in_reasoning, has_tools=bool(parsing.tools))
        self._section: Section = "reasoning" if parsing.begins_in_reasoning else "text"
        self._is_at_mark = parsing.begins_in_reasoning
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


class ForcedCallsParser:
    """Reads an answer that is JSON of calls. Text that was cut off before the end of the first call stays as it is."""

    def __init__(self, output: OutputFormat, parsing: OutputParsing) -> None:
        self._inner = MarkedMessageParser(output, parsing)
        self._called = parsing.called
        self._text = ""
        self.num_calls = 0

    def read(self, text: str) -> MessagePart:
        return self._without_content(self._inner.read(text))

    def finish(self) -> MessagePart:
        part = self._without_content(self._inner.finish())
        if self._called is not None:
            part.calls = [ToolCall(name=self._called, arguments=self._text)] if self._text else []
        else:
            part.calls = _calls(self._text)
            part.content = "" if part.calls else self._text
        self.num_calls = len(part.calls)
        return part

    def _without_content(self, part: MessagePart) -> MessagePart:
        self._text += part.content
        part.content = ""
        return part


def new_parser(output: OutputFormat, parsing: OutputParsing) -> MessageParser:
    return (MarkedMessageParser if parsing.answer == "message" else ForcedCallsParser)(output, parsing)


def forced_grammar(body: ChatBody) -> GrammarSource:
    """What the model may write where `tool_choice` makes it call a function. Raises InvalidRequest."""
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        (tool,) = (tool for tool in body.tools if tool.function.name == name)
        return GrammarSource(form="json", text=json.dumps(_parameters(tool)), parameter="tool_choice")
    return GrammarSource(form="calls", text=_functions(body), parameter="tools")


def strict_grammar(body: ChatBody) -> GrammarSource | None:
    """What keeps strict functions to their schemas where the model chooses whether to call them; None without any."""
    if not any(tool.function.strict for tool in body.tools):
        return None
    return GrammarSource(form="text_and_calls", text=_functions(body, all_strict=False), parameter="tools")


def _functions(body: ChatBody, *, all_strict: bool = True) -> str:
    functions = [
        {
            "name": tool.function.name,
            "parameters": _parameters(tool) if all_strict or tool.function.strict else {"type": "object"},
        }
        for tool in body.tools
    ]
    return json.dumps({"functions": functions, "several": body.parallel_tool_calls})


def _parameters(tool: Tool) -> dict[str, Any]:
    parameters = tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(f"the parameters of function {tool.function.name!r} should be an object", "tools")
    return {"type": "object"} | parameters


def _calls(text: str) -> list[ToolCall]:
    """Return the calls of a list, without a last one that was cut off."""
    calls: list[ToolCall] = []
    decoder, place = json.JSONDecoder(), len("[")
    while True:
        try:
            call, end = decoder.raw_decode(text, place)
        except ValueError:
            return calls
        calls.append(ToolCall(name=call["name"], arguments=json.dumps(call["arguments"], ensure_ascii=False)))
        place = end + len(", ")
