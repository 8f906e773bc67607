"""Wire types of requests: what clients send, checked strictly. Used in this folder only.

Optional fields that are null count as absent; that and the refused fields are the work of parse.py.
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

LARGEST_INT = 2**31 - 1  # token ids and counts are 32-bit in the arrays behind
MOST_BIASES = 1024
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
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= LARGEST_INT for item in value)


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
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise ValueError(f"should be an object of at most {MOST_BIASES} token ids and numbers")
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
    n: Annotated[int, Field(ge=1, le=LARGEST_INT)] = 1
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=LARGEST_INT)] = 0
    """-1 and 0 are off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[list[StopString], FIRST_FAULT, BeforeValidator(read_stop, json_schema_input_type=StopForms)] = []
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=LARGEST_INT)]], FIRST_FAULT] = []
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST_INT)] = 0
    """Before so many tokens only `max_tokens` ends the completion."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    logit_bias: Annotated[
        list[tuple[int, float]], PlainValidator(read_bias, json_schema_input_type=dict[str, float])
    ] = []
    prompt_logprobs: Annotated[int, Field(ge=0, le=LARGEST_INT)] | None = None
    """Log-probabilities of the prompt's tokens, and of so many most likely ones beside each."""
    best_of: Annotated[int, Field(ge=1, le=LARGEST_INT)] | None = None
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
    priority: Annotated[int, Field(ge=-LARGEST_INT, le=LARGEST_INT)] = 0
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
    max_tokens: Annotated[int, Field(ge=0, le=LARGEST_INT)] | None = None
    """0 with `echo` or `prompt_logprobs`: nothing is sampled."""
    logprobs: Annotated[int, Field(ge=0, le=LARGEST_INT)] | None = None
    echo: bool = False
    """Begin each text, and its `logprobs`, with the prompt's."""
