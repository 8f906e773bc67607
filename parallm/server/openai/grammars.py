"""Fields of a body that constrain the form of a text, as a compiled grammar. The routes call `constrained`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from parallm.conversation import GrammarForm, GrammarSource
from parallm.errors import InvalidRequest
from parallm.server.openai.chat_schemas import ChatBody, NamedTool, PlainFormat, SchemaFormat, Tool
from parallm.server.openai.completion_schemas import GenerationBody, StructuredOutputs
from parallm.server.openai.translate import template_tools
from parallm.server.service import Service
from parallm.types import GenerationRequest

ANY_OBJECT = '{"type": "object"}'


def body_grammar(body: GenerationBody) -> GrammarSource | None:
    """Return the grammar of vLLM's fields. Raises InvalidRequest if several are set."""
    return _only(_vllm_forms(body), body)


def chat_grammar(body: ChatBody) -> GrammarSource | None:
    """Return the grammar of a chat's answer. Raises InvalidRequest if several fields ask for different forms."""
    sources = _vllm_forms(body)
    match body.response_format:
        case PlainFormat(type="json_object"):
            sources.append(_source("json", ANY_OBJECT, "response_format"))
        case SchemaFormat(json_schema=schema):
            sources.append(_source("json", schema.json_schema, "response_format"))
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        (tool,) = (tool for tool in body.tools if tool.function.name == name)
        sources.append(_source("json", _parameters(tool), "tool_choice"))
    elif body.tool_choice == "required":
        sources.append(_source("calls", _functions(body), "tools"))
    elif template_tools(body):
        if sources:
            name = sources[0].parameter
            raise InvalidRequest(
                f"{name} leaves no place for tool calls; send tool_choice 'none' or leave one of them out", name
            )
        if any(tool.function.strict for tool in body.tools):  # text in which calls of these keep to their schemas
            sources.append(_source("text_and_calls", _functions(body, all_strict=False), "tools"))
    if sources and body.continue_final_message:
        raise InvalidRequest(f"{sources[0].parameter} excludes continue_final_message", sources[0].parameter)
    return _only(sources, body)


async def constrained(
    requests: Sequence[GenerationRequest], source: GrammarSource | None, service: Service, *, reasoning: bool | None
) -> list[GenerationRequest]:
    """Return the requests with the grammar, compiled on a thread. Raises InvalidRequest."""
    if source is None:
        return list(requests)
    settings = service.settings
    size = len((source.text + (source.whitespace or "")).encode())
    if size > settings.max_grammar_bytes:
        raise InvalidRequest(
            f"{source.parameter} has {size} bytes, the limit is {settings.max_grammar_bytes}; "
            "shorten it or raise server.max_grammar_bytes",
            source.parameter,
        )
    _check_json(source)
    work = partial(service.tokenizer.compile_grammar, source, reasoning=reasoning)
    try:
        grammar = await service.workers.run(work, max_seconds=settings.max_grammar_seconds)
    except TimeoutError as error:
        raise InvalidRequest(
            f"{source.parameter} took more than {settings.max_grammar_seconds} s to prepare; "
            "simplify it or raise server.max_grammar_seconds",
            source.parameter,
        ) from error
    return [replace(request, sampling=replace(request.sampling, grammar=grammar)) for request in requests]


def _vllm_forms(body: GenerationBody) -> list[GrammarSource]:
    outputs = body.structured_outputs or StructuredOutputs()
    name = "structured_outputs"
    fields: list[tuple[str, GrammarForm, object]] = [
        ("guided_json", "json", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        (name, "json", outputs.json_schema),
        (name, "json", ANY_OBJECT if outputs.json_object else None),
        (name, "regex", outputs.regex),
        (name, "choice", outputs.choice),
    ]
    return [_source(form, value, name) for name, form, value in fields if value is not None]


def _only(sources: Sequence[GrammarSource], body: GenerationBody) -> GrammarSource | None:
    """Return the one source with the body's white space.

    Raises InvalidRequest for several sources, and for fields about white space that contradict or lack any JSON.
    """
    if len(sources) > 1:
        names = [source.parameter for source in sources]
        raise InvalidRequest(f"only one of these can say what the text looks like: {names}", names[1])
    source = sources[0] if sources else None
    outputs = body.structured_outputs or StructuredOutputs()
    fields = {
        "structured_outputs.disable_any_whitespace": "" if outputs.disable_any_whitespace else None,
        "structured_outputs.whitespace_pattern": outputs.whitespace_pattern,
        "guided_whitespace_pattern": body.guided_whitespace_pattern,
    }
    patterns = {name: pattern for name, pattern in fields.items() if pattern is not None}
    if not patterns:
        return source
    (name, pattern), *others = patterns.items()
    if others:
        raise InvalidRequest(f"{name} and {others[0][0]} exclude each other; leave one of them out", others[0][0])
    if source is None or source.form in ("regex", "choice"):
        raise InvalidRequest(f"{name} is about JSON, which this request does not ask for; leave it out", name)
    return replace(source, whitespace=pattern)


def _source(form: GrammarForm, value: object, parameter: str) -> GrammarSource:
    """Make a source; a string is a regular expression or a schema as JSON."""
    return GrammarSource(form=form, text=value if isinstance(value, str) else json.dumps(value), parameter=parameter)


def _check_json(source: GrammarSource) -> None:
    if source.form == "json":
        try:
            json.loads(source.text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{source.parameter} is no JSON: {error}", source.parameter) from error


def _functions(body: ChatBody, *, all_strict: bool = True) -> dict[str, Any]:
    functions = [
        {
            "name": tool.function.name,
            "parameters": _parameters(tool) if all_strict or tool.function.strict else {"type": "object"},
        }
        for tool in body.tools
    ]
    return {"functions": functions, "several": body.parallel_tool_calls}


def _parameters(tool: Tool) -> dict[str, Any]:
    parameters = tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(f"the parameters of function {tool.function.name!r} should be an object", "tools")
    return {"type": "object"} | parameters
