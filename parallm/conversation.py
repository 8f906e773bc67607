"""What a chat is made of beyond plain turns: prompts that end in different ways, and parts of an answer."""

from dataclasses import dataclass
from typing import Literal

PromptEnd = Literal["answer", "message", "unfinished"]
"""Where a rendered chat ends: at the start of the model's answer, behind the last message, or inside that message."""
Section = Literal["text", "reasoning", "tool"]
"""`tool` is the text of a call between its marks, in the model's own notation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A rendered chat."""

    tokens: tuple[int, ...]
    begins_in_reasoning: bool = False
    """Whether what the model writes next belongs to reasoning that the prompt has begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: str
    """JSON."""
    call_id: str | None = None
    """The model's own id, where its notation has one."""


GrammarForm = Literal["json", "regex", "choice", "calls", "text_and_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSource:
    """What a text must look like: a JSON schema, a regular expression, one of a JSON list of strings.

    Or `calls`, a JSON list of calls `{"name": ..., "arguments": ...}`. Then the text here is JSON of `functions`, a
    list of names and schemas of `parameters`, and `several`, whether more than one may be called. `text_and_calls` is
    the same in the model's own notation: any text, and calls of these functions between it.
    """

    form: GrammarForm
    text: str
    parameter: str
    """The field that it comes from."""
    whitespace: str | None = None
    """Regular expression of the white space between two tokens of JSON, "" for none; None: at most one space or line
    end."""
