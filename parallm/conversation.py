"""Parts of a chat beyond plain turns: rendered prompts, tool calls, sources of grammars. Imports nothing of ParaLLM."""

from dataclasses import dataclass
from typing import Literal

PromptEnd = Literal["answer", "message", "unfinished"]
"""The end of a rendered chat: at the start of the model's answer, after the last message, or inside that message."""
Section = Literal["text", "reasoning", "tool"]
"""Kind of a part of an answer; `tool` is the text of a call between its marks, in the model's own notation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A rendered chat. Example: `ChatPrompt(tokens=(1, 27, 11), begins_in_reasoning=True)`."""

    tokens: tuple[int, ...]
    begins_in_reasoning: bool = False
    """Whether the prompt ends inside of reasoning, which the model continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function that the model wants called. Example: `ToolCall(name="add", arguments='{"a": 2, "b": 3}')`."""

    name: str
    arguments: str
    """JSON."""
    call_id: str | None = None
    """The id that the model wrote, if its notation has one."""


GrammarForm = Literal["json", "regex", "choice", "calls", "text_and_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSource:
    """The source of a grammar: a JSON schema, a regular expression, or a JSON list of strings to choose from.

    `calls` is a JSON list of calls `{"name": ..., "arguments": ...}`; `text` is then JSON of `functions`, a list of
    names and schemas of `parameters`, and `several`, whether more than one may be called. `text_and_calls` is the same
    in the model's own notation: any text with calls of these functions. Example:
    `GrammarSource(form="regex", text="[0-9]+", parameter="structured_outputs")`.
    """

    form: GrammarForm
    text: str
    parameter: str
    """Field of the request that it comes from."""
    whitespace: str | None = None
    """Regular expression of the white space between two tokens of JSON; "" allows none, None one space or line end."""
