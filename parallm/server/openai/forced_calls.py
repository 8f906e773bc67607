"""Tool calls by grammar. Those that are forced are JSON from the first character, without the model's own marks."""

import json
from typing import Any

from parallm.conversation import GrammarSource, ToolCall
from parallm.errors import InvalidRequest
from parallm.server.openai.chat_schemas import ChatBody, NamedTool, Tool
from parallm.server.openai.message_reader import MarkedMessageReader, MessagePart, MessageReader, Reading
from parallm.server.service import OutputFormat


class ForcedCallsReader:
    """Reads an answer that is JSON of calls. Text that was cut off before the end of the first call stays as it is."""

    def __init__(self, output: OutputFormat, reading: Reading) -> None:
        self._inner = MarkedMessageReader(output, reading)
        self._called = reading.called
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


def new_reader(output: OutputFormat, reading: Reading) -> MessageReader:
    return (MarkedMessageReader if reading.answer == "message" else ForcedCallsReader)(output, reading)


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
