"""Wire types of `POST /v1/completions`, and the fields that other endpoints share with it."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator

from parallm.server.schemas import FIRST_FAULT, MAX_INT, Wire, is_tokens

MAX_BIASES = 1024

StopString = Annotated[str, Field(min_length=1, max_length=1024)]
PromptForms: TypeAlias = str | list[str] | list[int] | list[list[int]]


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
    biases = []
    for token, bias in value.items():
        is_token = token.isascii() and token.isdecimal() and len(token) < 10
        if not is_token or type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError('should have token ids as names and numbers from -100 to 100, as in {"50256": -100}')
        biases.append((int(token), float(bias)))
    return biases


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
    """Fields that completions and chats share."""

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
    stop: Annotated[
        list[StopString], FIRST_FAULT, BeforeValidator(read_stop, json_schema_input_type=StopString | list[StopString])
    ] = Field(default=[])
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], FIRST_FAULT] = Field(default=[])
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] = 0
    """Number of tokens before which only `max_tokens` ends the completion."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    logit_bias: Annotated[
        list[tuple[int, float]], PlainValidator(read_bias, json_schema_input_type=dict[str, float])
    ] = Field(default=[])
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    """Number of likely tokens in the log-probs of each of the prompt's tokens."""
    best_of: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    """Refused unless it is `n`: nothing is sampled that is not given back."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Write `token_id:5` in log-probs in place of the token's text."""
    request_id: Annotated[str, Field(min_length=1, max_length=256, pattern="^[^#]+$")] | None = None
    """Given back in the answer; `POST /abort_requests` knows the request by it. `#` numbers its prompts: not in it."""
    step_id: int | Annotated[str, Field(max_length=256)] | None = None
    """Step of a training framework; given back in the answer."""
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] = 0
    """The waiting request with the lowest number goes first."""
    user: str | None = None
    """Users stay on one side of a split; nothing else depends on this."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Only requests with the same salt share the prefix cache."""
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    """This and `prompt_cache_key` are accepted and unused, as `store: false` is: they change nothing in the answer."""
    store: Literal[False] = False
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_whitespace_pattern: str | None = None
    """The older names of what is in `structured_outputs`."""
    collect_trajectory: bool = False
    """Let the policy learn from these completions, with rewards that come later or from `scoring_function`."""
    scoring_function: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Name of a scoring function that the run has registered."""
    metadata: Any = None
    """A small object for the scoring function. Checked in trajectory_recorder.py, whose refusals do not quote it."""


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Annotated[list[str | list[int]], PlainValidator(read_prompts, json_schema_input_type=PromptForms)]
    add_special_tokens: bool = True
    """Begin the tokens of a text as the tokenizer begins one by itself."""
    parse_special: bool | None = None
    """Make tokens of the texts of control tokens in a prompt; null: `server.parse_special`."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    """0 with `echo` or `prompt_logprobs`: nothing is sampled."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    echo: bool = False
    """Begin each text, and its `logprobs`, with the prompt's."""


class PromptTokensDetails(Wire):
    cached_tokens: int
    """Tokens of the prompts that were in the prefix cache."""


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
    """Fields of every choice; `finish_reason` and the two after it are set when the choice is finished."""

    index: int
    finish_reason: str | None
    policy_version: int | None
    weight_versions: list[WeightVersions] | None
    token_ids: list[int] | None = None
    trajectory_id: str | None = None
    """Id for rewards of a finished choice, with `collect_trajectory`."""


class CompletionLogprobs(Wire):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedLogprob(Wire):
    """Log-prob of one token at a position of the prompt."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str


class CompletionChoice(ChoiceFields):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | None = None
    """Log-probs by position and token id, the prompt's own token first."""


class Echo(Wire):
    """Fields by which a training framework finds its answers again; each is there if the request had it."""

    request_id: str | None = None
    step_id: int | str | None = None
    logprobs_mode: Literal["temperature"] | None = None
    """Log-probabilities are after temperature and before top_k, top_p and min_p."""


class Answer(Echo):
    """Fields of every whole answer, and of every chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChoiceFields]
    usage: Usage | None = None


class CompletionAnswer(Answer):
    """A whole answer, or a chunk of a stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
