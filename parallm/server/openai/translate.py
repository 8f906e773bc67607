"""Wire requests to domain requests: pure functions. What only the engine can know, it checks itself."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parallm.conversation import ChatPrompt, PromptEnd
from parallm.errors import ContextTooLong, InvalidRequest
from parallm.server.openai.chat_schemas import (
    AssistantMessage,
    ChatBody,
    ChatMessage,
    NamedTool,
    SentToolCall,
    ToolMessage,
)
from parallm.server.openai.output_parser import OutputParsing
from parallm.server.schemas import CompletionBody, GenerationBody
from parallm.server.service import Tokenizer
from parallm.server.settings import ServerSettings
from parallm.server.text_bounds import check_items, check_text, check_texts
from parallm.types import GenerationRequest, SamplingParams


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


MIN_TEMPERATURE = 0.01
"""Lowest temperature above 0, which is greedy."""


def completion_requests(
    body: CompletionBody, request_id: str, *, tokenizer: Tokenizer, settings: ServerSettings, max_context: int
) -> list[GenerationRequest]:
    """One request for each prompt. Raises InvalidRequest."""
    _check_limits(body, len(body.prompt), settings)
    top_logprobs = _checked_top_logprobs("logprobs", body.logprobs or 0, settings)
    _check_whole(body)
    prompts = [_prompt_tokens(prompt, body, tokenizer, settings, max_context) for prompt in body.prompt]
    shown = [count for count in (body.logprobs if body.echo else None, body.prompt_logprobs) if count is not None]
    return [
        GenerationRequest(
            request_id=f"{request_id}#{index}",
            prompt_tokens=prompt,
            sampling=_sampling(
                body,
                _room(prompt, settings, max_context, "prompt") if body.max_tokens is None else body.max_tokens,
                top_logprobs,
                max(shown, default=None),
            ),
            n=body.n,
            model=body.model,
            priority=body.priority,
            user=body.user,
            cache_salt=body.cache_salt or "",
        )
        for index, prompt in enumerate(prompts)
    ]


def chat_request(
    body: ChatBody, request_id: str, *, tokenizer: Tokenizer, settings: ServerSettings, max_context: int
) -> tuple[GenerationRequest, OutputParsing]:
    """Raises InvalidRequest, also where the chat template refuses the messages."""
    _check_limits(body, 1, settings)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
    top_logprobs = _checked_top_logprobs("top_logprobs", body.top_logprobs or 0, settings)
    prompt = chat_prompt(body, tokenizer, max_context)
    max_tokens = _chat_max_tokens(body) or _room(prompt.tokens, settings, max_context, "messages")
    request = GenerationRequest(
        request_id=request_id,
        prompt_tokens=prompt.tokens,
        sampling=_sampling(body, max_tokens, top_logprobs, body.prompt_logprobs),
        n=body.n,
        model=body.model,
        priority=body.priority,
        user=body.user,
        cache_salt=body.cache_salt or "",
    )
    return request, _reading(body, tokenizer, begins_in_reasoning=prompt.begins_in_reasoning)


def _prompt_tokens(
    prompt: str | list[int], body: CompletionBody, tokenizer: Tokenizer, settings: ServerSettings, max_context: int
) -> tuple[int, ...]:
    if isinstance(prompt, str):
        check_text(prompt, "prompt", tokenizer, max_context)
        parses = settings.parse_special if body.parse_special is None else body.parse_special
        return tokenizer.encode(prompt, add_special=body.add_special_tokens, parse_special=parses)
    check_items(prompt, "tokens", "prompt", max_context)
    return tuple(prompt)


def _reading(body: ChatBody, tokenizer: Tokenizer, *, begins_in_reasoning: bool) -> OutputParsing:
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        return OutputParsing(begins_in_reasoning=begins_in_reasoning, answer="arguments", called=name)
    if body.tool_choice == "required":
        return OutputParsing(begins_in_reasoning=begins_in_reasoning, answer="calls")
    tools = shown_tools(body)
    if tools and tokenizer.output.tool_marks is None:
        raise InvalidRequest("how this model writes tool calls is unknown; leave tools out", "tools")
    return OutputParsing(
        begins_in_reasoning=begins_in_reasoning, tools=tools, max_calls=None if body.parallel_tool_calls else 1
    )


def _chat_max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(f"max_tokens is {old} and max_completion_tokens is {new}; send one of them", "max_tokens")
    return new if new is not None else old


def _room(prompt: Sequence[int], settings: ServerSettings, max_context: int, name: str) -> int:
    """Tokens for a request that names none: the default, or fewer where the context ends before."""
    if len(prompt) >= max_context:
        raise ContextTooLong(
            f"{name} has {len(prompt)} tokens and this model's maximum context length is {max_context}, with the "
            "answer; shorten it",
            name,
            setting="engine.max_context",
        )
    return min(settings.default_max_tokens, max_context - len(prompt))


def _sampling(body: GenerationBody, max_tokens: int, top_logprobs: int, prompt_logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(0, body.top_k),
        min_p=body.min_p,
        seed=body.seed,
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        top_logprobs=top_logprobs,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(body.logit_bias),
        min_tokens=body.min_tokens,
        prompt_logprobs=prompt_logprobs,
    )


def _checked_top_logprobs(name: str, value: int, settings: ServerSettings) -> int:
    if value > settings.max_top_logprobs:
        raise InvalidRequest(
            f"{name} is {value}, the limit is {settings.max_top_logprobs}; raise server.max_top_logprobs", name
        )
    return value


def _check_whole(body: CompletionBody) -> None:
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise InvalidRequest("max_tokens is 0; send at least 1, or ask for echo or prompt_logprobs", "max_tokens")
    if body.echo and body.logprobs is not None and body.stream:
        raise InvalidRequest("echo with logprobs is not streamed; leave one of the three out", "echo")


def _check_limits(body: GenerationBody, num_prompts: int, settings: ServerSettings) -> None:
    if body.n > settings.max_n:
        raise InvalidRequest(f"n is {body.n}, the limit is {settings.max_n}; raise server.max_n", "n")
    if num_prompts * body.n > settings.max_completions:
        raise InvalidRequest(
            f"{num_prompts} prompts times n={body.n} are more than {settings.max_completions} completions; "
            "send several requests or raise server.max_completions",
            "prompt" if num_prompts > 1 else "n",
        )
    num_stop = max(len(body.stop), len(body.stop_token_ids))
    if num_stop > settings.max_stop:
        name = "stop" if len(body.stop) == num_stop else "stop_token_ids"
        raise InvalidRequest(
            f"{name} has {num_stop} items, the limit is {settings.max_stop}; raise server.max_stop", name
        )
    if body.best_of is not None and body.best_of != body.n:
        raise InvalidRequest(f"best_of is {body.best_of} and n is {body.n}; leave best_of out", "best_of")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs are not streamed; leave stream out", "prompt_logprobs")
    _checked_top_logprobs("prompt_logprobs", body.prompt_logprobs or 0, settings)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
    if body.stream_options and body.stream_options.continuous_usage_stats and not body.stream_options.include_usage:
        raise InvalidRequest("continuous_usage_stats needs include_usage: true", "stream_options")
    if 0 < body.temperature < MIN_TEMPERATURE:
        # logits divided by less leave the range of float32
        raise InvalidRequest(
            f"temperature is {body.temperature}; send 0 for greedy or at least {MIN_TEMPERATURE}", "temperature"
        )
