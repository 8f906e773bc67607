"""Wire requests to `GenerationRequest`s: pure functions, which run on a thread for long bodies.

The routes of OpenAI's endpoints, the dialects and `/tokenize` call these. Raises InvalidRequest for what a field, a
setting or the chat template forbids; the engine checks what it alone can know.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from parallm.conversation import ChatPrompt, PromptEnd
from parallm.errors import InvalidRequest
from parallm.server.catalog import means_the_same, model_of
from parallm.server.interfaces import Tokenizer
from parallm.server.openai.chat_schemas import (
    AssistantMessage,
    ChatBody,
    ChatMessage,
    NamedTool,
    SentToolCall,
    ToolMessage,
)
from parallm.server.openai.completion_schemas import CompletionBody, GenerationBody
from parallm.server.openai.output_parser import OutputParsing
from parallm.server.operation.request_context import request_traffic
from parallm.server.request_limits import check_items, check_text, check_texts, too_long
from parallm.server.schemas import Wire
from parallm.server.service import Service
from parallm.server.settings import ServerSettings
from parallm.types import BASE, GenerationRequest, SamplingParams

MIN_TEMPERATURE = 0.01
"""Lowest temperature above 0, which is greedy."""

Body = TypeVar("Body", bound=GenerationBody)
AnyBody = TypeVar("AnyBody", bound=Wire)


def completion_requests(body: CompletionBody, answer_id: str, service: Service) -> list[GenerationRequest]:
    """Return one request for each prompt."""
    _check_limits(body, len(body.prompt), service.settings, logprobs=body.logprobs)
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise InvalidRequest("max_tokens is 0; send at least 1, or ask for echo or prompt_logprobs", "max_tokens")
    if body.echo and body.logprobs is not None and body.stream:
        raise InvalidRequest("echo with logprobs is not streamed; leave one of the three out", "echo")
    counts = [count for count in (body.logprobs if body.echo else None, body.prompt_logprobs) if count is not None]
    requests = []
    for index, prompt in enumerate(body.prompt):
        tokens = _prompt_tokens(prompt, body, service)
        max_tokens = _default_max_tokens(tokens, service, "prompt") if body.max_tokens is None else body.max_tokens
        prompt_logprobs = max(counts, default=None)
        requests.append(_request(body, f"{answer_id}#{index}", tokens, max_tokens, body.logprobs, prompt_logprobs))
    return requests


def chat_request(body: ChatBody, answer_id: str, service: Service) -> tuple[GenerationRequest, OutputParsing]:
    """Return the request, and how to parse the text of its answers."""
    _check_limits(body, 1, service.settings, top_logprobs=body.top_logprobs)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
    prompt = chat_prompt(body, service.tokenizer, service.engine.max_context)
    max_tokens = _chat_max_tokens(body) or _default_max_tokens(prompt.tokens, service, "messages")
    request = _request(body, answer_id, prompt.tokens, max_tokens, body.top_logprobs, body.prompt_logprobs)
    return request, _parsing(body, service.tokenizer, begins_in_reasoning=prompt.begins_in_reasoning)


def effective_body(body: Body, service: Service) -> Body:
    """Return the body with the model that `lora_adapter` names, and with defaults for sampling fields not sent."""
    return with_defaults(with_lora_adapter(body, service), service.sampling_defaults)


def with_lora_adapter(body: Body, service: Service) -> Body:
    """Return the body with `lora_adapter` as its `model`, unless `model` names another adapter."""
    if body.lora_adapter is None:
        return body
    adapter = model_of(service, body.lora_adapter)
    if not means_the_same(service, body.model, adapter):
        raise InvalidRequest(
            f"model is {body.model[:100]!r} and lora_adapter is {body.lora_adapter[:100]!r}; leave one of them out, or "
            f"send {BASE!r} as the model",
            "lora_adapter",
        )
    return body.model_copy(update={"model": adapter, "lora_adapter": None})


def with_defaults(body: AnyBody, defaults: Mapping[str, float]) -> AnyBody:
    """Return the body with `defaults` for the fields that were not sent.

    A body with `collect_trajectory` stays as it is, since the policy learns from its own samples.
    """
    if getattr(body, "collect_trajectory", False):
        return body
    missing = defaults.keys() & type(body).model_fields.keys() - body.model_fields_set
    return body.model_copy(update={name: defaults[name] for name in missing}) if missing else body


def chat_prompt(body: ChatBody, tokenizer: Tokenizer, max_context: int) -> ChatPrompt:
    """Return what the model's chat template writes."""
    check_texts(list(_texts(body)), "messages", tokenizer, max_context)
    _check_call_ids(body.messages)
    return tokenizer.encode_prompt(
        [to_turn(message) for message in body.messages],
        tools=template_tools(body),
        variables=_variables(body, tokenizer),
        end=_end(body),
    )


def template_tools(body: ChatBody) -> list[dict[str, Any]]:
    """Return the tools that the model may call, as templates know them: none where `tool_choice` forbids them."""
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
    """Return a message as templates read it: text parts joined, arguments of calls as objects."""
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
    """Yield all texts that a template may write."""
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
    """Refuse a tool's result without a call before it: most templates show no ids, so nothing else would notice."""
    call_ids: set[str] = set()
    for position, message in enumerate(messages):
        if isinstance(message, AssistantMessage):
            call_ids |= {call.id for call in message.tool_calls or ()}
        elif isinstance(message, ToolMessage) and message.tool_call_id not in call_ids:
            name = f"messages.{position}.tool_call_id"
            raise InvalidRequest(
                f"{name} is {message.tool_call_id!r}; no message before it has a call of this id", name
            )


def _variables(body: ChatBody, tokenizer: Tokenizer) -> Mapping[str, object]:
    """Return the template's variables. An effort without effect is refused."""
    effort, names = body.reasoning_effort, tokenizer.template_variables
    if effort is None:
        return body.chat_template_kwargs
    if "reasoning_effort" in names:
        return {"reasoning_effort": effort} | body.chat_template_kwargs
    if effort == "none":
        return ({"enable_thinking": False} if "enable_thinking" in names else {}) | body.chat_template_kwargs
    raise InvalidRequest(
        "reasoning_effort is not supported by this model's chat template; leave it out or send 'none'",
        "reasoning_effort",
    )


def _end(body: ChatBody) -> PromptEnd:
    if not body.continue_final_message:
        return "answer" if body.add_generation_prompt else "message"
    name, last = "continue_final_message", body.messages[-1]
    if "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt:
        raise InvalidRequest(f"{name} and add_generation_prompt exclude each other", name)
    if not isinstance(last, AssistantMessage) or not last.content or last.tool_calls:
        raise InvalidRequest(f"{name} needs text of the assistant as the last message", name)
    return "unfinished"


def _prompt_tokens(prompt: str | list[int], body: CompletionBody, service: Service) -> tuple[int, ...]:
    if isinstance(prompt, str):
        check_text(prompt, "prompt", service.tokenizer, service.engine.max_context)
        parses = service.settings.parse_special if body.parse_special is None else body.parse_special
        return service.tokenizer.encode(prompt, add_special=body.add_special_tokens, parse_special=parses)
    check_items(prompt, "tokens", "prompt", service.engine.max_context)
    return tuple(prompt)


def _parsing(body: ChatBody, tokenizer: Tokenizer, *, begins_in_reasoning: bool) -> OutputParsing:
    parsing = partial(OutputParsing, begins_in_reasoning=begins_in_reasoning)
    if isinstance(body.tool_choice, NamedTool):
        return parsing(answer="arguments", called=body.tool_choice.function.name)
    if body.tool_choice == "required":
        return parsing(answer="calls")
    tools = template_tools(body)
    if tools and tokenizer.output.tool_marks is None:
        raise InvalidRequest("how this model writes tool calls is unknown; leave tools out", "tools")
    return parsing(tools=tools, max_calls=None if body.parallel_tool_calls else 1)


def _chat_max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(f"max_tokens is {old} and max_completion_tokens is {new}; send one of them", "max_tokens")
    return new if new is not None else old


def _default_max_tokens(prompt: Sequence[int], service: Service, name: str) -> int:
    """Return the default, or fewer tokens where the context ends before."""
    max_context = service.engine.max_context
    if len(prompt) >= max_context:
        raise too_long(name, f"{len(prompt)} tokens", f"{max_context}, with the answer")
    return min(service.settings.default_max_tokens, max_context - len(prompt))


def _request(
    body: GenerationBody,
    request_id: str,
    tokens: tuple[int, ...],
    max_tokens: int,
    top_logprobs: int | None,
    prompt_logprobs: int | None,
) -> GenerationRequest:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(0, body.top_k),
        min_p=body.min_p,
        seed=body.seed,
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        top_logprobs=top_logprobs or 0,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(body.logit_bias),
        min_tokens=body.min_tokens,
        prompt_logprobs=prompt_logprobs,
    )
    return GenerationRequest(
        request_id=request_id,
        prompt_tokens=tokens,
        sampling=sampling,
        n=body.n,
        model=body.model,
        traffic=request_traffic.get(),
        priority=body.priority,
        user=body.user,
        cache_salt=body.cache_salt or "",
    )


def _check_limits(body: GenerationBody, num_prompts: int, settings: ServerSettings, **counts: int | None) -> None:
    """Raise InvalidRequest for the first thing that is wrong. `counts` are the likely tokens that a field asks for."""
    limit = settings.max_top_logprobs
    for name, count in {"prompt_logprobs": body.prompt_logprobs, **counts}.items():
        if count is not None and count > limit:
            raise InvalidRequest(f"{name} is {count}, the limit is {limit}; raise server.max_top_logprobs", name)
    if wrong := next(_refusals(body, num_prompts, settings), None):
        raise InvalidRequest(*wrong)


def _refusals(body: GenerationBody, num_prompts: int, settings: ServerSettings) -> Iterator[tuple[str, str]]:
    """Yield the message and the field of each thing that is wrong."""
    if body.n > settings.max_n:
        yield f"n is {body.n}, the limit is {settings.max_n}; raise server.max_n", "n"
    if num_prompts * body.n > settings.max_completions:
        message = (
            f"{num_prompts} prompts times n={body.n} are more than {settings.max_completions} completions; "
            "send several requests or raise server.max_completions"
        )
        yield message, "prompt" if num_prompts > 1 else "n"
    for name, items in ("stop", body.stop), ("stop_token_ids", body.stop_token_ids):
        if len(items) > settings.max_stop:
            yield f"{name} has {len(items)} items, the limit is {settings.max_stop}; raise server.max_stop", name
    if body.best_of not in (None, body.n):
        yield f"best_of is {body.best_of} and n is {body.n}; leave best_of out", "best_of"
    if body.prompt_logprobs is not None and body.stream:
        yield "prompt_logprobs are not streamed; leave stream out", "prompt_logprobs"
    if body.stream_options is not None and not body.stream:
        yield "stream_options needs stream: true", "stream_options"
    if body.stream_options and body.stream_options.continuous_usage_stats and not body.stream_options.include_usage:
        yield "continuous_usage_stats needs include_usage: true", "stream_options"
    if 0 < body.temperature < MIN_TEMPERATURE:
        # logits divided by less leave the range of float32
        yield f"temperature is {body.temperature}; send 0 for greedy or at least {MIN_TEMPERATURE}", "temperature"
    if not body.collect_trajectory and body.scoring_function is not None:
        yield "scoring_function needs collect_trajectory: true", "scoring_function"
    if not body.collect_trajectory and body.metadata not in (None, {}):
        yield "metadata is kept only with collect_trajectory: true; leave it out", "metadata"
