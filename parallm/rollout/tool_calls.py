"""Function calling in rollouts: the functions of a problem in its prompt, and the calls in the model's text."""

import json
from collections.abc import Sequence

from parallm.conversation import ToolCall
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.types import Message, Problem

NUM_MARK_TOKENS = 8


def encode_problem(tokenizer: ChatTokenizer, problem: Problem) -> tuple[int, ...]:
    """Return the prompt's tokens. Raises InvalidRequest if the chat template refuses the messages or has no tools."""
    if not problem.tools:
        return tokenizer.encode_chat(problem.messages)
    turns = [{"role": message.role, "content": message.content} for message in problem.messages]
    return tokenizer.encode_prompt(turns, tools=json.loads(problem.tools)).tokens


def parse_response(tokenizer: ChatTokenizer, problem: Problem, prompt: Sequence[int], text: str) -> Message | None:
    """Return the turn that `text` after `prompt` means; None if the problem has no functions.

    Reasoning is left out. Text between the marks of a call that is no call stays in the content.
    """
    if not problem.tools:
        return None
    output, tools = tokenizer.output, json.loads(problem.tools)
    in_reasoning = output.ends_with_reasoning_mark(tokenizer.decode(prompt[-NUM_MARK_TOKENS:], special=True))
    reader = output.reader(begins_in_reasoning=in_reasoning, has_tools=True)
    content, call = "", ""
    calls: list[ToolCall] = []
    for section, piece in [*reader.read(text), *reader.finish(), ("text", "")]:
        if section == "tool":
            call += piece
            continue
        if call:
            parsed = output.parse_calls(call, tools)
            content += "" if parsed else call.join(output.tool_marks or ("", ""))
            calls, call = [*calls, *parsed], ""
        content += piece if section == "text" else ""
    return Message(role="assistant", content=content.strip(), calls=tuple(calls))
