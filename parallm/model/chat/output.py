"""Parses a model's text into reasoning, tool calls and the answer itself, by the marks that mlx-lm knows of it."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from parallm.conversation import Section, ToolCall

logger = logging.getLogger(__name__)

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
"""Name of a function in OpenAI's API; some parsers take any text for one."""
SECTIONS: Mapping[str, Section] = {"normal": "text", "reasoning": "reasoning", "tool": "tool"}
"""mlx-lm's names of states; text in others, such as headers of turns, is not shown by it either."""


class OutputFormat:
    """The marks of one model's answers. Pure Python: usable on any thread."""

    def __init__(self, wrapper: TokenizerWrapper) -> None:
        self._wrapper = wrapper
        self._parse: Callable[[str, Any], Any] | None = wrapper.tool_parser
        self._machines = {has_tools: _machine(wrapper, has_tools) for has_tools in (False, True)}

    @property
    def marks(self) -> tuple[str, ...]:
        """Everything that begins or ends a section."""
        wrapper = self._wrapper
        marks = (wrapper.think_start, wrapper.think_end, wrapper.tool_call_start, wrapper.tool_call_end)
        return tuple(mark for mark in (*marks, *wrapper.structural_markers) if mark)

    @property
    def reasoning_marks(self) -> tuple[str, str] | None:
        return (self._wrapper.think_start, self._wrapper.think_end) if self._wrapper.has_thinking else None

    @property
    def tool_marks(self) -> tuple[str, str] | None:
        """Marks before and after a tool call; None for a model whose notation is unknown."""
        return (self._wrapper.tool_call_start, self._wrapper.tool_call_end or "") if self._parse else None

    @property
    def json_call_marks(self) -> tuple[str, str] | None:
        """The same, if the text between them is JSON of a name and arguments."""
        parser = getattr(self._parse, "__module__", "")
        return self.tool_marks if parser.endswith(".json_tools") else None

    def opens_reasoning(self, text: str) -> bool:
        """Whether `text` ends inside of reasoning, or opens it at its end."""
        start, end = self._wrapper.think_start, self._wrapper.think_end
        return start is not None and text.rfind(start) > text.rfind(end)

    def ends_with_reasoning_mark(self, text: str) -> bool:
        start = self._wrapper.think_start
        return start is not None and text.rstrip().endswith(start)

    def reader(self, *, begins_in_reasoning: bool, has_tools: bool) -> "OutputReader":
        state = self._wrapper.response_initial_state or ("reasoning" if begins_in_reasoning else "normal")
        return OutputReader(self._machines[has_tools].make_state(state))

    def parse_calls(self, text: str, tools: Sequence[Mapping[str, object]]) -> list[ToolCall]:
        """The calls in a section `tool`; none if the model wrote something else there, or its notation is unknown."""
        if self._parse is None:
            return []
        try:
            parsed = self._parse(text, [dict(tool) for tool in tools])
            return [_tool_call(item) for item in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception:  # a parser meets whatever the model wrote
            logger.debug("the model wrote no call", exc_info=True)
            return []


class OutputReader:
    """Text of one answer as it comes, in sections. Text that may become a mark is held back."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def read(self, text: str) -> list[tuple[Section, str]]:
        """New pieces in order; a piece may be empty where a section ended or began."""
        self._state, pieces = TextStateMachine.split(self._state, text)
        return [(SECTIONS[name], piece) for name, piece in pieces if name in SECTIONS]

    def finish(self) -> list[tuple[Section, str]]:
        """Text that was held back and did not become a mark."""
        self._state, text, name = TextStateMachine.flush(self._state)
        return [(SECTIONS[name], text)] if name in SECTIONS else []


def _machine(wrapper: TokenizerWrapper, has_tools: bool) -> TextStateMachine:
    facts = SimpleNamespace(
        has_thinking=wrapper.has_thinking,
        think_start=wrapper.think_start,
        think_end=wrapper.think_end,
        has_tool_calling=has_tools and wrapper.has_tool_calling,
        tool_call_start=wrapper.tool_call_start,
        tool_call_end=wrapper.tool_call_end,
        structural_markers=wrapper.structural_markers,
        response_transitions=wrapper.response_transitions,
    )
    return make_text_state_machine(facts)


def _tool_call(parsed: object) -> ToolCall:
    """Raises ValueError."""
    name = parsed.get("name") if isinstance(parsed, dict) else None
    if not isinstance(parsed, dict) or not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError("a call needs a name of a function")
    arguments = parsed.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are an object")
    call_id = parsed.get("id")
    return ToolCall(
        name=name,
        arguments=json.dumps(arguments, ensure_ascii=False),
        call_id=call_id if isinstance(call_id, str) else None,
    )
