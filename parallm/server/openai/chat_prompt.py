"""Chat bodies to prompts: messages in the words of templates, tools, and what the client says of the template."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parallm.conversation import ChatPrompt, PromptEnd
from parallm.errors import InvalidRequest
from parallm.server.openai.chat_schemas import (
    AssistantMessage,
    ChatBody,
    ChatMessage,
    NamedTool,
    SentToolCall,
    ToolMessage,
)
from parallm.server.service import Tokenizer
from parallm.server.text_bounds import check_texts


def chat_prompt(body: ChatBody, tokenizer: Tokenizer, max_context: int) -> ChatPrompt:
    """Raises InvalidRequest, also where the chat template refuses the messages."""
    check_texts(list(_texts(body)), "messages", tokenizer, max_context)
    _check_call_ids(body.messages)
    return tokenizer.encode_prompt(
        [to_turn(message) for message in body.messages],
        tools=shown_tools(body),
        variables=_variables(body, tokenizer),
        end=_end(body),
    )


def shown_tools(body: ChatBody) -> list[dict[str, Any]]:
    """Tools that the model may call, as templates know them: none where `tool_choice` forbids them."""
    if body.tool_choice == "none":
        return []
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        if name not in {tool.function.name for tool in body.tools}:
            raise InvalidRequest(f"tool_choice names {name!r}, which is not among tools", "tool_choice")
    elif body.tool_choice == "required" and not body.tools:
        raise InvalidRequest('tool_choice "required" needs tools', "tool_choice")
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"tools has several functions of one name: {names}", "tools")
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.tools]


def to_turn(message: ChatMessage) -> dict[str, object]:
    """One message as templates read it. Text parts are joined as they are; arguments of calls become objects."""
    content = "".join(part.text for part in message.content)
    match message:
        case AssistantMessage():
            turn: dict[str, object] = {"role": "assistant", "content": content}
            if message.reasoning_content is not None:
                turn["reasoning_content"] = message.reasoning_content
            if message.tool_calls:
                turn["tool_calls"] = [_call(call) for call in message.tool_calls]
            elif not message.content and not message.reasoning_content:
                raise InvalidRequest("a message of the assistant needs content or tool_calls", "messages")
            return turn
        case ToolMessage():
            name = {} if message.name is None else {"name": message.name}
            return {"role": "tool", "content": content, "tool_call_id": message.tool_call_id, **name}
        case _:
            return {"role": "system" if message.role == "developer" else message.role, "content": content}


def _texts(body: ChatBody) -> Iterator[str]:
    """All that a template may write."""
    for message in body.messages:
        yield from (part.text for part in message.content)
        if isinstance(message, AssistantMessage):
            yield message.reasoning_content or ""
            yield from (call.function.arguments for call in message.tool_calls or ())
    yield from (tool.model_dump_json(exclude_none=True) for tool in body.tools)
    if body.chat_template_kwargs:
        yield json.dumps(body.chat_template_kwargs)


def _call(call: SentToolCall) -> dict[str, object]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the arguments of tool call {call.id!r} are no JSON: {error}", "messages") from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"the arguments of tool call {call.id!r} are no JSON object", "messages")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _check_call_ids(messages: Sequence[ChatMessage]) -> None:
    """Each result of a tool answers a call before it: most templates show no ids, so nothing else would notice."""
    known: set[str] = set()
    for position, message in enumerate(messages):
        if isinstance(message, AssistantMessage):
            known |= {call.id for call in message.tool_calls or ()}
        elif isinstance(message, ToolMessage) and message.tool_call_id not in known:
            name = f"messages.{position}.tool_call_id"
            raise InvalidRequest(
                f"{name} is {message.tool_call_id!r}; no message before it has a call of this id", name
            )


def _variables(body: ChatBody, tokenizer: Tokenizer) -> Mapping[str, object]:
    """The template's variables, `reasoning_effort` among them. Raises InvalidRequest for an effort without effect."""
    effort, known = body.reasoning_effort, tokenizer.template_variables
    if effort is None:
        return body.chat_template_kwargs
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort} | body.chat_template_kwargs
    if effort == "none":
        return ({"enable_thinking": False} if "enable_thinking" in known else {}) | body.chat_template_kwargs
    raise InvalidRequest(
        "reasoning_effort is not supported by this model's chat template; leave it out or send 'none'",
        "reasoning_effort",
    )


def _end(body: ChatBody) -> PromptEnd:
    if not body.continue_final_message:
        return "answer" if body.add_generation_prompt else "message"
    if "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    last = body.messages[-1]
    if not isinstance(last, AssistantMessage) or not last.content or last.tool_calls:
        raise InvalidRequest(
            "continue_final_message needs text of the assistant as the last message", "continue_final_message"
        )
    return "unfinished"
