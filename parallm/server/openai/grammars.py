"""What a client asks texts to look like: from the fields of a body to a compiled grammar."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from parallm.conversation import GrammarForm, GrammarSource
from parallm.errors import InvalidRequest
from parallm.server.openai.chat_schemas import ChatBody, JsonFormat, NamedTool, SchemaFormat
from parallm.server.openai.output_parser import forced_grammar, strict_grammar
from parallm.server.openai.translate import shown_tools
from parallm.server.schemas import GenerationBody, StructuredOutputs
from parallm.server.service import Service
from parallm.types import GenerationRequest

ANY_OBJECT = '{"type": "object"}'


def body_grammar(body: GenerationBody) -> GrammarSource | None:
    """Of vLLM's fields, which both endpoints have. Raises InvalidRequest where there are several."""
    return _with_whitespace(_only(_vllm_forms(body)), body)


def chat_grammar(body: ChatBody) -> GrammarSource | None:
    """Raises InvalidRequest where several fields each ask for a form of their own."""
    found = _vllm_forms(body)
    match body.response_format:
        case JsonFormat():
            found.append(_source("json", ANY_OBJECT, "response_format"))
        case SchemaFormat(json_schema=asked):
            found.append(_source("json", asked.json_schema, "response_format"))
    if is_forced(body):
        found.append(forced_grammar(body))
    elif shown_tools(body):
        if found:
            name = found[0].parameter
            raise InvalidRequest(
                f"{name} leaves no place for tool calls; send tool_choice 'none' or leave one of them out", name
            )
        strict = strict_grammar(body)
        found += [] if strict is None else [strict]
    if found and body.continue_final_message:
        raise InvalidRequest(f"{found[0].parameter} excludes continue_final_message", found[0].parameter)
    return _with_whitespace(_only(found), body)


def is_forced(body: ChatBody) -> bool:
    """Whether the model must call a function."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


async def constrained(
    requests: Sequence[GenerationRequest], source: GrammarSource | None, service: Service, *, reasoning: bool | None
) -> list[GenerationRequest]:
    """`requests` with the grammar, compiled beside the event loop. Raises InvalidRequest."""
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
    asked = body.structured_outputs or StructuredOutputs()
    name = "structured_outputs"
    fields: list[tuple[str, GrammarForm, object]] = [
        ("guided_json", "json", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        (name, "json", asked.json_schema),
        (name, "json", ANY_OBJECT if asked.json_object else None),
        (name, "regex", asked.regex),
        (name, "choice", asked.choice),
    ]
    return [_source(form, value, name) for name, form, value in fields if value is not None]


def _with_whitespace(source: GrammarSource | None, body: GenerationBody) -> GrammarSource | None:
    """Apply the body's fields about white space in JSON. Raises InvalidRequest if they contradict each other, or if the
    request does not ask for JSON."""
    asked = body.structured_outputs or StructuredOutputs()
    given = {
        "structured_outputs.disable_any_whitespace": "" if asked.disable_any_whitespace else None,
        "structured_outputs.whitespace_pattern": asked.whitespace_pattern,
        "guided_whitespace_pattern": body.guided_whitespace_pattern,
    }
    patterns = {name: pattern for name, pattern in given.items() if pattern is not None}
    if not patterns:
        return source
    (name, pattern), *others = patterns.items()
    if others:
        raise InvalidRequest(f"{name} and {others[0][0]} exclude each other; leave one of them out", others[0][0])
    if source is None or source.form in ("regex", "choice"):
        raise InvalidRequest(f"{name} is about JSON, which this request does not ask for; leave it out", name)
    return replace(source, whitespace=pattern)


def _source(form: GrammarForm, value: object, parameter: str) -> GrammarSource:
    """Strings are taken as they are: a regular expression, or a schema as JSON."""
    return GrammarSource(form=form, text=value if isinstance(value, str) else json.dumps(value), parameter=parameter)


def _check_json(source: GrammarSource) -> None:
    if source.form == "json":
        try:
            json.loads(source.text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{source.parameter} is no JSON: {error}", source.parameter) from error


def _only(found: Sequence[GrammarSource]) -> GrammarSource | None:
    if len(found) > 1:
        names = [source.parameter for source in found]
        raise InvalidRequest(f"only one of these can say what the text looks like: {names}", names[1])
    return found[0] if found else None
