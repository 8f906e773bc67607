"""Ollama's bodies as the chats and completions of `/v1`, and those as requests to the engine.

Pure functions, which run on a thread for long bodies. Raises InvalidRequest for what a field, a setting or the model's
chat template forbids.
"""

import json
import uuid
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from parallm.conversation import GrammarSource
from parallm.errors import ContextTooLong, InvalidRequest
from parallm.server.ollama.names import own_name
from parallm.server.ollama.options import OllamaOptions, read_options, sampling_fields
from parallm.server.ollama.schemas import (
    GenerationFields,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    SentFunction,
    Think,
)
from parallm.server.openai.chat_schemas import ChatBody
from parallm.server.openai.completion_schemas import CompletionBody, GenerationBody
from parallm.server.openai.grammars import body_grammar, chat_grammar
from parallm.server.openai.output_parser import OutputParsing
from parallm.server.openai.translate import chat_request, completion_requests
from parallm.server.request_limits import too_long
from parallm.server.schemas import checked
from parallm.server.service import Service
from parallm.types import GenerationRequest

ANY_TOKENS = 1
"""`max_tokens` until the length of the prompt is known."""
LEVELS = ("low", "medium", "high")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaRequest:
    """A body as one request to the engine."""

    body: GenerationBody
    request: GenerationRequest
    parsing: OutputParsing | None
    """None: a raw prompt, whose answer is plain text."""
    grammar: GrammarSource | None
    num_dropped: int = 0
    """Oldest messages that the context had no room for."""


def generate_request(body: OllamaGenerateBody, service: Service) -> OllamaRequest:
    if body.suffix:
        raise InvalidRequest(f'"{body.model}" does not support insert: send no suffix', "suffix")
    if body.template:
        raise InvalidRequest(
            "template is not supported: the model's own chat template is used; leave it out", "template"
        )
    if body.raw:
        return _raw_request(body, service)
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": body.prompt}]
    before = tuple(body.context or ())
    return _chat_request(body, service, messages, before=before)


def prepared_chat(body: OllamaChatBody, service: Service) -> OllamaRequest:
    """Return the request of a chat; the oldest messages are dropped where they are too many, unless `truncate` is
    false."""
    if body.tools and body.format is not None:
        raise InvalidRequest("format leaves no place for tool calls; leave tools or format out", "format")
    if body.tools and service.tokenizer.output.tool_marks is None:
        raise InvalidRequest(f'"{body.model}" does not support tools: how it writes calls is unknown', "tools")
    messages = _messages(body.messages)
    if body.system and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": body.system})
    if body.num_predict is not None:
        body = body.model_copy(update={"options": {"num_predict": body.num_predict} | body.options})
    tools = [{"type": "function", "function": tool.function.model_dump(exclude_none=True)} for tool in body.tools]
    return _chat_request(body, service, messages, starts=_starts(messages) if body.truncate else (), tools=tools)


def _raw_request(body: OllamaGenerateBody, service: Service) -> OllamaRequest:
    if body.system or body.context:
        raise InvalidRequest("raw mode does not support template, system, or context", "raw")
    if body.think:
        raise InvalidRequest("raw mode has no template that could tell the model to think; leave think out", "think")
    options = read_options(body.options)
    fields = _fields(body, options, service) | {"prompt": body.prompt}
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs
    if body.format is not None:
        fields["guided_json"] = {"type": "object"} if body.format == "json" else body.format
    completion = checked(fields, CompletionBody)
    (request,) = completion_requests(completion, _answer_id(), service)
    request = _within(replace(request, request_id=request.request_id.partition("#")[0]), options, service)
    return OllamaRequest(body=completion, request=request, parsing=None, grammar=body_grammar(completion))


def _chat_request(
    body: GenerationFields,
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    *,
    starts: Sequence[int] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    before: tuple[int, ...] = (),
) -> OllamaRequest:
    """Return the request of a chat. One that is too long begins at the first of `starts` from where it fits, after the
    messages of the system."""
    options = read_options(body.options)
    fields = _fields(body, options, service) | _thinking(body, service) | {"tools": list(tools)}
    fields |= {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs if body.logprobs else None}
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format}}
    answer_id = _answer_id()

    def begun_at(start: int) -> OllamaRequest:
        system = [message for message in messages[:start] if message["role"] == "system"]
        chat = checked(fields | {"messages": [*system, *messages[start:]]}, ChatBody)
        request, parsing = chat_request(chat, answer_id, service)
        if before:
            request = replace(request, prompt_tokens=_joined(before, request.prompt_tokens, service))
        return OllamaRequest(
            body=chat,
            request=_within(request, options, service),
            parsing=parsing,
            grammar=chat_grammar(chat),
            num_dropped=start - len(system),
        )

    try:
        return begun_at(0)
    except ContextTooLong:
        if not starts:
            raise
    fits: dict[int, OllamaRequest] = {}

    def is_short(start: int) -> bool:
        try:
            fits[start] = begun_at(start)
        except ContextTooLong:
            return False
        return True

    first = starts[min(bisect_left(starts, True, key=is_short), len(starts) - 1)]
    return fits.get(first) or begun_at(first)


def _within(request: GenerationRequest, options: OllamaOptions, service: Service) -> GenerationRequest:
    """Return the request with the number of tokens that it may sample. Raises ContextTooLong if there is no room."""
    context = min(options.num_ctx or service.engine.max_context, service.engine.max_context)
    room = context - len(request.prompt_tokens)
    if room < 1:
        raise too_long("the prompt", f"{len(request.prompt_tokens)} tokens", f"{context}, with the answer")
    max_tokens = room if options.num_predict < 0 else min(options.num_predict, room)
    return replace(request, sampling=replace(request.sampling, max_tokens=max_tokens))


def _fields(body: GenerationFields, options: OllamaOptions, service: Service) -> dict[str, Any]:
    return {
        **sampling_fields(options, service.sampling_defaults),
        "model": own_name(service, body.model),
        "stream": body.stream,
        "max_tokens": ANY_TOKENS,
    }


def _thinking(body: GenerationFields, service: Service) -> dict[str, Any]:
    """Return the fields that tell the model's template whether and how much to think."""
    think, names = body.think, service.tokenizer.template_variables
    if not service.tokenizer.output.reasoning_marks:
        if think:
            raise InvalidRequest(f'"{body.model}" does not support thinking', "think")
        return {}
    if isinstance(think, str):
        return _level(think, names)
    if "enable_thinking" in names:
        return {"chat_template_kwargs": {"enable_thinking": think is not False}}
    if think is False:
        raise InvalidRequest("think is false, and this model's template cannot tell it not to; leave it out", "think")
    return {}


def _level(think: Think, names: frozenset[str]) -> dict[str, Any]:
    if "reasoning_effort" not in names or think not in LEVELS:
        known = " or ".join(map(repr, LEVELS)) if "reasoning_effort" in names else "true or false"
        raise InvalidRequest(
            f"think is {think!r}, and this model's template knows no such level; send {known}", "think"
        )
    return {"reasoning_effort": think}


def _joined(before: tuple[int, ...], prompt: tuple[int, ...], service: Service) -> tuple[int, ...]:
    """Return the tokens of a prompt after those of an earlier answer, without a second beginning of the text."""
    start = service.tokenizer.encode("")
    begins = bool(start) and before[: len(start)] == start == prompt[: len(start)]
    return before + (prompt[len(start) :] if begins else prompt)


def _messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return messages in the words of `/v1`, where each call has an id and each result names the one of its call."""
    translated: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # ids and names of calls without a result
    numbers = count(1)
    for position, message in enumerate(messages):
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.role == "tool":
            turn["tool_call_id"] = _answered_call(message, position, open_calls)
            if message.tool_name:
                turn["name"] = message.tool_name
        elif message.role == "assistant":
            calls = [(call.id or f"call_{next(numbers)}", call.function) for call in message.tool_calls or ()]
            open_calls += [(call_id, function.name) for call_id, function in calls]
            turn |= {
                "reasoning_content": message.thinking or None,
                "tool_calls": [_call(*call) for call in calls] or None,
            }
        translated.append(turn)
    return translated


def _answered_call(message: OllamaMessage, position: int, open_calls: list[tuple[str, str]]) -> str:
    """Return the id of the call whose result this is, and take it out of `open_calls`.

    That is the one with its id, else the oldest of its function, else the oldest.
    """
    if not open_calls:
        raise InvalidRequest(f"messages.{position} is the result of a call, and no call before it has none", "messages")
    wanted = (message.tool_call_id, message.tool_name)
    by_id = [index for index, (call_id, _) in enumerate(open_calls) if call_id == wanted[0]]
    by_name = [index for index, (_, name) in enumerate(open_calls) if name == wanted[1]]
    return open_calls.pop([*by_id, *by_name, 0][0])[0]


def _call(call_id: str, function: SentFunction) -> dict[str, Any]:
    return {"id": call_id, "function": {"name": function.name, "arguments": json.dumps(function.arguments)}}


def _starts(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return where a chat without its oldest messages may begin: at a user's message, or in the last turn at one of the
    assistant, so that no result stands without its call."""
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    last = users[-1] if users else 0
    within = [index for index, message in enumerate(messages) if index > last and message["role"] == "assistant"]
    return [index for index in (*users, *within) if index > 0]


def _answer_id() -> str:
    return f"ollama-{uuid.uuid4().hex}"
