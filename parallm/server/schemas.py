"""Wire types of requests: what clients send, checked strictly. Used in this folder only.

Optional fields that are null count as absent; that and the refused fields are the work of parse.py.
"""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import ErrorDetails, from_json

from parallm.errors import InvalidRequest

MAX_INT = 2**31 - 1  # token ids and counts are 32-bit in the arrays behind
MAX_BIASES = 1024
FIRST_FAULT = Field(fail_fast=True)  # or a body of a million wrong items makes a million error objects

StopString = Annotated[str, Field(min_length=1, max_length=1024)]
StopForms: TypeAlias = StopString | list[StopString]
PromptForms: TypeAlias = str | list[str] | list[int] | list[list[int]]


class Wire(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def is_tokens(value: object) -> bool:
    """Whether this is a list of what could be token ids. By hand: strict and stops at the first wrong item."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= MAX_INT for item in value)


def read_prompts(value: object) -> list[str | list[int]]:
    """The four forms of a prompt as one list. Raises ValueError where a prompt is empty or of another type."""
    if isinstance(value, str) or (is_tokens(value) and value):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, str) or is_tokens(item) for item in value):
        raise ValueError("should be a string, a list of strings, a list of token ids or a list of such lists")
    if not value or not all(value):
        raise ValueError("should not be empty: the model needs at least one token to continue from")
    return value


def read_bias(value: object) -> list[tuple[int, float]]:
    """Token ids, which are text in JSON, and numbers. By hand: strict and stops at the first wrong item."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise ValueError(f"should be an object of at most {MAX_BIASES} token ids and numbers")
    found = []
    for token, bias in value.items():
        is_token = token.isascii() and token.isdecimal() and len(token) < 10
        if not is_token or type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError('should have token ids as names and numbers from -100 to 100, as in {"50256": -100}')
        found.append((int(token), float(bias)))
    return found


def read_stop(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


class StreamOptions(Wire):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: bool = False


Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024, fail_fast=True)]


class StructuredOutputs(Wire):
    """vLLM's forms of a text, at most one, and options for JSON."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    json_object: Literal[True] | None = None
    disable_any_whitespace: bool = False
    """JSON without white space; otherwise at most one space or line end stands between two tokens."""
    whitespace_pattern: str | None = None
    """Regular expression of the white space between two tokens of JSON."""
    disable_fallback: bool = False
    """Accepted and unused: there is no other backend to fall back to."""
    disable_additional_properties: Literal[False] = False
    grammar: None = None
    structural_tag: None = None
    """These three are not supported."""


class GenerationBody(Wire):
    """What both kinds of request share."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    lora_adapter: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Adapter that answers, beside a `model` that names the base: `checkpoint-12` (version 12 of the policy),
    `best-performance`, `latest`, or the name of another adapter."""
    n: Annotated[int, Field(ge=1, le=MAX_INT)] = 1
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] = 0
    """-1 and 0 are off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[list[StopString], FIRST_FAULT, BeforeValidator(read_stop, json_schema_input_type=StopForms)] = []
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], FIRST_FAULT] = []
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] = 0
    """Before so many tokens only `max_tokens` ends the completion."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    logit_bias: Annotated[
        list[tuple[int, float]], PlainValidator(read_bias, json_schema_input_type=dict[str, float])
    ] = []
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    """Log-probabilities of the prompt's tokens, and of so many most likely ones beside each."""
    best_of: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    """Refused unless it is `n`: nothing is sampled that is not given back."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """In log-probs `token_id:5` stands for the text of the token."""
    request_id: Annotated[str, Field(min_length=1, max_length=256, pattern="^[^#]+$")] | None = None
    """Given back in the answer; `POST /abort_requests` knows the request by it. `#` numbers its prompts: not in it."""
    step_id: int | Annotated[str, Field(max_length=256)] | None = None
    """Of a training framework; given back in the answer."""
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] = 0
    """Of waiting requests the one with the lowest number goes first."""
    user: str | None = None
    """Gets the same side of a split every time; nothing else depends on it."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Only requests with the same one share what is kept of the beginnings of prompts."""
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    """These two are accepted and unused, as `store: false` is: by definition they change nothing in the answer."""
    store: Literal[False] = False
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_whitespace_pattern: str | None = None
    """The older names of what is in `structured_outputs`."""
    collect_trajectory: bool = False
    """Let the policy learn from these completions, by rewards that come later or from `scoring_function`."""
    scoring_function: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """One that the run has registered."""
    metadata: Any = None
    """A small object for the scoring function. Checked in recording.py, whose refusals do not quote it."""


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Annotated[list[str | list[int]], PlainValidator(read_prompts, json_schema_input_type=PromptForms)]
    add_special_tokens: bool = True
    """Begin the tokens of a text as the tokenizer begins one by itself."""
    parse_special: bool | None = None
    """Whether texts of control tokens in a prompt become the tokens; null: `server.parse_special`."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    """0 with `echo` or `prompt_logprobs`: nothing is sampled."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    echo: bool = False
    """Begin each text, and its `logprobs`, with the prompt's."""


class ErrorDetail(Wire):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Wire):
    error: ErrorDetail


class ModelEntry(Wire):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    policy_version: int


class ModelList(Wire):
    object: Literal["list"]
    data: list[ModelEntry]


class PromptTokensDetails(Wire):
    cached_tokens: int
    """Tokens of the prompts that were known from before, and not computed."""


class Usage(Wire):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    """Not in the chunks of a stream that still goes on."""


class WeightVersions(Wire):
    """Output tokens `start` to `end` (half-open) came from this adapter version."""

    version: str
    start: int
    end: int


class ChoiceFields(Wire):
    """What every choice carries; the first three are set when the choice is finished."""

    index: int
    finish_reason: str | None
    policy_version: int | None
    weight_versions: list[WeightVersions] | None
    token_ids: list[int] | None = None
    trajectory_id: str | None = None
    """Where rewards go, of a finished choice that was asked for with `collect_trajectory`."""


class CompletionLogprobs(Wire):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedLogprob(Wire):
    """Of one token at a position of the prompt."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str


class CompletionChoice(ChoiceFields):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | None = None
    """By position and token id, the prompt's own token first."""


class Echo(Wire):
    """What a training framework finds its answers again by; each field is there if it was asked for."""

    request_id: str | None = None
    step_id: int | str | None = None
    logprobs_mode: Literal["temperature"] | None = None
    """Log-probabilities are after temperature and before top_k, top_p and min_p."""


class CompletionAnswer(Echo):
    """Also the shape of each chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopTokenLogprob(Wire):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopTokenLogprob):
    top_logprobs: list[TopTokenLogprob]


class ChatLogprobs(Wire):
    content: list[TokenLogprob]


class AnsweredFunction(Wire):
    name: str | None = None
    arguments: str


class AnsweredToolCall(Wire):
    """A call, or in a stream a part of one: then `index` says of which."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: AnsweredFunction


class ChatText(Wire):
    """A whole message, or a delta of one."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredToolCall] | None = None


class ChatChoice(ChoiceFields):
    message: ChatText
    logprobs: ChatLogprobs | None


class ChatChunkChoice(ChoiceFields):
    delta: ChatText
    logprobs: ChatLogprobs | None


class ChatAnswer(Echo):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | None = None
    """By position and token id, the prompt's own token first."""


class ChatChunk(Echo):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


Body = TypeVar("Body", bound=Wire)

MANY = 50_000
MIN_BYTES = 16
"""Of a body for each list in it, and for each object and field, once there are many: prompts and messages have more."""

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
"""Fields that this server does not implement, with the values that ask for nothing; null is one of them for all."""


def parse_body(body: bytes, schema: type[Body]) -> Body:
    """The body as `schema`. Raises InvalidRequest that names the first field at fault."""
    return checked(read_object(body), schema)


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises InvalidRequest."""
    _check_density(body)
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the request body should be a JSON object")
    return value


def _check_density(body: bytes) -> None:
    """Raises InvalidRequest for a body that is mostly brackets or names: nothing runs while objects are made of it."""
    for mark in (b"[", b"{", b":"):
        number = body.count(mark)
        if number > MANY and number * MIN_BYTES > len(body):
            raise InvalidRequest(
                f"the request body has {number} times {mark.decode()!r} in {len(body)} bytes, the limit is once in "
                f"{MIN_BYTES}; send several requests"
            )


def checked(value: Mapping[str, Any], schema: type[Body], neutral: Mapping[str, tuple[object, ...]] = NEUTRAL) -> Body:
    """The object as `schema`. Raises InvalidRequest that names the first field at fault.

    `neutral` are fields that the schema lacks, with the values that ask for nothing.
    """
    try:
        return schema.model_validate(_known_fields(value, schema, neutral))
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_context=False)[0]) from error


def _known_fields(
    value: Mapping[str, Any], schema: type[Body], neutral: Mapping[str, tuple[object, ...]]
) -> dict[str, Any]:
    fields = {}
    for name, item in value.items():
        field = schema.model_fields.get(name)
        if field is None:
            _check_neutral(name, item, neutral, schema)
        elif item is not None or field.is_required():
            fields[name] = item
    return fields


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
    before, should, after = error["msg"].partition("should")
    message = should + after if should else before
    return InvalidRequest(f"{location} {message}; it is {_shown(error['input'])}", location)


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
