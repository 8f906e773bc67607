"""`POST /v1/responses` as a chat: the same conversation in the words of the other endpoint."""

from typing import Any

from parallm.errors import InvalidRequest
from parallm.server.openai.chat_schemas import ChatBody
from parallm.server.openai.response_schemas import (
    InputCall,
    InputCallOutput,
    InputMessage,
    InputReasoning,
    ResponseBody,
    ResponseNamedTool,
    ResponseSchemaFormat,
)


def to_chat(body: ResponseBody) -> ChatBody:
    """Raises InvalidRequest where an item does not fit those around it."""
    fields: dict[str, Any] = {
        "model": body.model,
        "lora_adapter": body.lora_adapter,
        "messages": _messages(body),
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools],
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body),
        "user": body.user,
    }
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    return ChatBody.model_validate(fields)


def named_as_sent(error: InvalidRequest) -> InvalidRequest:
    """The error with the field's name of this endpoint."""
    names = {
        "messages": "input",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
    }
    head, dot, rest = (error.parameter or "").partition(".")
    error.parameter = (names.get(head, head) + (dot + rest if head not in names else "")) or None
    return error


def _messages(body: ResponseBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    for item in body.input:
        match item:
            case InputMessage(role="assistant"):
                _turn(messages, "content")["content"] = "".join(part.text for part in item.content)
            case InputMessage():
                messages.append({"role": item.role, "content": "".join(part.text for part in item.content)})
            case InputReasoning():
                _turn(messages, "reasoning_content")["reasoning_content"] = "".join(part.text for part in item.content)
            case InputCall():
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                _turn(messages, None).setdefault("tool_calls", []).append(call)
            case InputCallOutput():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
    return messages


def _turn(messages: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    """The assistant's turn that the next item belongs to: the last message, or a new one where that has it already."""
    last = messages[-1] if messages else {"role": ""}
    is_over = last["role"] != "assistant" or (name is not None and (name in last or "tool_calls" in last))
    if is_over or (name == "reasoning_content" and "content" in last):
        messages.append({"role": "assistant"})
    return messages[-1]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(body: ResponseBody) -> object:
    if isinstance(body.tool_choice, ResponseNamedTool):
        return {"type": "function", "function": {"name": body.tool_choice.name}}
    return body.tool_choice


def _format(body: ResponseBody) -> dict[str, Any]:
    asked = body.text.format
    if isinstance(asked, ResponseSchemaFormat):
        schema = {"name": asked.name, "schema": asked.json_schema}
        return {"type": "json_schema", "json_schema": schema}
    return {"type": asked.type}
