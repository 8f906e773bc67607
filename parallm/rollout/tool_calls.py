"""Problems whose model may call functions: how they are put to it, and which calls its text means."""

import json
from collections.abc import Sequence

from parallm.conversation import ToolCall
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.types import Message, Problem

NUM_TOKENS_OF_A_MARK = 8


def encode_problem(tokenizer: ChatTokenizer, problem: Problem) -> tuple[int, ...]:
    """The prompt's tokens. Raises InvalidRequest where the chat template refuses the messages or knows no functions."""
    if not problem.tools:
        return tokenizer.encode_chat(problem.messages)
    turns = [{"role": message.role, "content": message.content} for message in problem.messages]
    return tokenizer.encode_prompt(turns, tools=json.loads(problem.tools)).tokens


def parse_response(tokenizer: ChatTokenizer, problem: Problem, prompt: Sequence[int], text: str) -> Message | None:
    """The turn that `text` behind `prompt` means; None where the problem has no functions.

    Reasoning is left out. What stands between the marks of a call and is none stays a part of the content.
    """
    if not problem.tools:
        return None
    output, tools = tokenizer.output, json.loads(problem.tools)
    in_reasoning = output.ends_with_reasoning_mark(tokenizer.decode(prompt[-NUM_TOKENS_OF_A_MARK:], special=True))
    reader = output.reader(begins_in_reasoning=in_reasoning, has_tools=True)
    content, call = "", ""
    calls: list[ToolCall] = []
    for section, piece in [*reader.read(text), *reader.finish(), ("text", "")]:
        if section == "tool":
            call += piece
            continue
        if call:
            found = output.parse_calls(call, tools)
            content += "" if found else call.join(output.tool_marks or ("", ""))
            calls, call = [*calls, *found], ""
        content += piece if section == "text" else ""
    return Message(role="assistant", content=content.strip(), calls=tuple(calls))
