"""Base of all wire types, the shape of errors, and bytes of a body to a checked type.

A field is honoured or refused by name; nothing is ignored. Optional fields that are null count as absent. In answers a
field with a default is left out unless it was set.
"""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, from_json

from parallm.errors import InvalidRequest

MAX_INT = 2**31 - 1  # token ids and counts are 32-bit in the engine's arrays
ModelName = Annotated[str, Field(min_length=1, max_length=512)]
FIRST_FAULT = Field(fail_fast=True)  # or a body of a million wrong items makes a million error objects


class Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def is_tokens(value: object) -> bool:
    """Return whether this is a list of integers that could be token ids. It stops at the first wrong item."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_INT for item in value)


def read_tokens(value: object) -> list[int]:
    if not isinstance(value, list) or not value or not is_tokens(value):
        raise ValueError("should be a list of token ids that is not empty")
    return value


Tokens = Annotated[list[int], PlainValidator(read_tokens, json_schema_input_type=list[int])]


def text_parts(value: object, kind: str = "text") -> object:
    """Return a string as a list of one text part; lists stay as they are."""
    if not isinstance(value, str | list):
        raise ValueError("should be a string or a list of text parts")
    return [{"type": kind, "text": value}] if isinstance(value, str) else value


class Done(Wire):
    status: Literal["ok"]


class ErrorDetail(Wire):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Wire):
    error: ErrorDetail


Body = TypeVar("Body", bound=Wire)

MAX_UNCHECKED = 50_000
"""Lists, objects or fields up to this number may stand close together."""
MIN_BYTES = 16
"""Least bytes of a body for each list, object and field in it, if there are many. Real bodies have more."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "background": (False,),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "context_management": ([],),
    "continue_final_message": (False,),
    "conversation": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "max_tool_calls": (),
    "metadata": ({},),
    "moderation": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "previous_response_id": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Values that ask for nothing, by field that this server does not implement; null is such a value for all."""


def parse_body(body: bytes, schema: type[Body]) -> Body:
    """Return the body as `schema`. Raises InvalidRequest that names the first field at fault."""
    return checked(read_object(body), schema)


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raises InvalidRequest."""
    _check_density(body)
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the request body should be a JSON object")
    return value


def _check_density(body: bytes) -> None:
    """Raise InvalidRequest for a body that is mostly brackets or names: parsing it would stop all streams."""
    for mark in (b"[", b"{", b":"):
        number = body.count(mark)
        if number > MAX_UNCHECKED and number * MIN_BYTES > len(body):
            raise InvalidRequest(
                f"the request body has {number} times {mark.decode()!r} in {len(body)} bytes, the limit is once in "
                f"{MIN_BYTES}; send several requests"
            )


def checked(value: Mapping[str, Any], schema: type[Body], neutral: Mapping[str, tuple[object, ...]] = NEUTRAL) -> Body:
    """Return the object as `schema`. Raises InvalidRequest that names the first field at fault.

    `neutral` are fields that the schema lacks, with the values that ask for nothing.
    """
    fields = {}
    for name, item in value.items():
        field = schema.model_fields.get(name) or _field_of_alias(schema, name)
        if field is None:
            _check_neutral(name, item, neutral, schema)
        elif item is not None or field.is_required():
            fields[name] = item
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_context=False)[0]) from error


def _field_of_alias(schema: type[Wire], alias: str) -> FieldInfo | None:
    """Return the field of a name that Python keeps for itself, such as `from`."""
    return next((field for field in schema.model_fields.values() if field.alias == alias), None)


def _check_neutral(name: str, value: object, neutral: Mapping[str, tuple[object, ...]], schema: type[Wire]) -> None:
    if name not in neutral:
        close = get_close_matches(name[:100], schema.model_fields, 1, cutoff=0.8)
        way_out = f"did you mean {close[0]!r}?" if close else "remove it from the request"
        raise InvalidRequest(f"unknown field {name[:100]!r}; {way_out}", name[:100])
    accepted = neutral[name]
    # bool is an int in Python: without the second half, `"n": false` would pass for 0
    if value is None or any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in accepted):
        return
    choices = " or ".join(json.dumps(item) for item in (*accepted, None))
    raise InvalidRequest(f"{name} is not supported by this server; leave it out or send {choices}", name)


def _invalid(error: ErrorDetails) -> InvalidRequest:
    location = ".".join(str(part) for part in error["loc"])[:200]
    if error["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown field {location!r}; remove it from the request", location)
    if error["type"] == "missing":
        return InvalidRequest(f"the field {location!r} is required", location)
    start, should, rule = error["msg"].partition("should")
    message = should + rule if should else start
    return InvalidRequest(f"{location} {message}; it is {_shown(error['input'])}", location)


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
