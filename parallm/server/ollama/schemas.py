"""Wire types of Ollama's routes that generate and embed, requests and answers, and their errors."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from parallm.errors import InvalidRequest
from parallm.server.keep_alive import KeepAlive
from parallm.server.openai.chat_schemas import MAX_TOOLS, FunctionTool
from parallm.server.schemas import FIRST_FAULT, ModelName, Wire, read_object, read_tokens

Think = bool | Literal["low", "medium", "high", "max"]
NO_IMAGES = "should be empty: this server reads no images"
MAX_LOGPROBS = 20


def read_images(value: object) -> list[str]:
    if value not in (None, []):
        raise ValueError(NO_IMAGES)
    return []


NoImages = Annotated[list[str], PlainValidator(read_images, json_schema_input_type=list[str])]


def read_format(value: object) -> dict[str, Any] | Literal["json"] | None:
    """Return a JSON schema, `json` for any object, or None."""
    if value in (None, ""):
        return None
    if value == "json" or isinstance(value, dict):
        return value
    raise ValueError('should be "json" or a JSON schema')


Format = Annotated[
    dict[str, Any] | Literal["json"] | None, PlainValidator(read_format, json_schema_input_type=dict[str, Any] | str)
]
Text = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]


class GenerationFields(Wire):
    """Fields that generate and chat share."""

    model: ModelName
    stream: bool = True
    format: Format = None
    """`json` for any JSON object, or a JSON schema. Reasoning before the answer is free."""
    options: dict[str, Any] = Field(default_factory=dict)
    """See `options.py`."""
    keep_alive: KeepAlive | None = None
    """Time that the model stays loaded after this answer: seconds, or a duration such as 5m; below 0: for ever."""
    think: Think | None = None
    """Whether a model that can think does so before it answers; absent: it does."""
    truncate: bool = True
    """Whether the oldest messages are dropped where a chat is longer than its context; else it is refused."""
    shift: bool | None = None
    """Without effect: an answer that reaches the end of the context ends there, with the reason `length`."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    metadata: Any = None
    """Without effect. Sent by Open WebUI."""


class OllamaGenerateBody(GenerationFields):
    """`POST /api/generate`."""

    prompt: str = ""
    """An empty one loads the model, or unloads it with a `keep_alive` of 0."""
    suffix: str = ""
    system: str = ""
    template: str = ""
    """Go's templates are not known here: the model's own is used."""
    context: Annotated[list[int], PlainValidator(read_tokens, json_schema_input_type=list[int])] | None = None
    """`context` of an earlier answer, which this prompt continues."""
    raw: bool = False
    """Take the prompt as it is, without the model's template."""
    images: NoImages = Field(default=[])


class SentFunction(Wire):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None


class SentCall(Wire):
    """A call of an earlier answer."""

    function: SentFunction
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


class OllamaMessage(Wire):
    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
    ]
    content: Text = ""
    thinking: Text = ""
    images: NoImages = Field(default=[])
    tool_calls: list[SentCall] | None = None
    tool_name: str | None = None
    """Name of the function whose result this is."""
    tool_call_id: str | None = None


class OllamaTool(Wire):
    function: FunctionTool
    type: Literal["function"] = "function"


class OllamaChatBody(GenerationFields):
    """`POST /api/chat`."""

    messages: Annotated[list[OllamaMessage], FIRST_FAULT] = Field(default=[])
    """No message loads the model, or unloads it with a `keep_alive` of 0."""
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default=[])
    system: str = ""
    """Message of the system, where `messages` has none. Open WebUI sends this and `num_predict` here."""
    num_predict: int | None = None
    """The option of this name, where `options` has none."""


class OllamaEmbedBody(Wire):
    """`POST /api/embed`."""

    model: ModelName
    input: Any = None
    """A text or a list of texts."""
    truncate: bool = True
    """Whether the end of a text beyond the context is left out; else such a text is refused."""
    dimensions: Annotated[int, Field(ge=0)] = 0
    """Numbers that are kept of each vector, which is normalized again; 0, and more than it has: all."""
    keep_alive: KeepAlive | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    """`num_ctx` counts; what is about sampling changes no vector."""


class OllamaEmbeddingsBody(Wire):
    """`POST /api/embeddings`, the older route for one text."""

    model: ModelName
    prompt: str = ""
    truncate: bool = True
    keep_alive: KeepAlive | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    input: Any = None
    """Without effect. Open WebUI sends it beside the same text as `prompt`."""


class LikelyToken(Wire):
    token: str
    logprob: float
    bytes: list[int] | None


class SampledToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class AnswerFields(Wire):
    """Fields of each line of an answer. Those of how it ended stand in the last line: measured times in nanoseconds,
    and numbers of tokens."""

    model: str
    """The name that the request asked for."""
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "abort", "load", "unload"] | None = None
    total_duration: int | None = None
    """From the request's arrival to its last token."""
    load_duration: int | None = None
    """Time that the request waited for its model to be loaded; absent where it was loaded."""
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    """From the request to the engine to its first token, the queue included."""
    eval_count: int | None = None
    eval_duration: int | None = None
    """From the first token to the last."""
    logprobs: list[SampledToken] | None = None
    policy_version: int | None = None
    """Adapter version that sampled the last token; absent for the base."""


class OllamaGenerateAnswer(AnswerFields):
    response: str
    thinking: str | None = None
    context: list[int] | None = None
    """Token ids of prompt and answer, for the next request's `context`."""


class AnsweredFunction(Wire):
    index: int
    name: str
    arguments: dict[str, Any]


class AnsweredCall(Wire):
    id: str
    function: AnsweredFunction


class AnsweredMessage(Wire):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class OllamaChatAnswer(AnswerFields):
    message: AnsweredMessage


class OllamaEmbedAnswer(Wire):
    model: str
    embeddings: list[list[float]]
    total_duration: int | None = None
    """Nanoseconds from the request's arrival to its vectors."""
    load_duration: int | None = None
    """Nanoseconds that the request waited for its model to be loaded; absent where it was loaded."""
    prompt_eval_count: int | None = None
    """Tokens of all texts."""


class OllamaEmbeddingsAnswer(Wire):
    embedding: list[float]


class OllamaError(Wire):
    error: str


def object_of(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raises InvalidRequest."""
    if not body:
        raise InvalidRequest("missing request body")
    return read_object(body)


def timestamp(seconds: float | None = None) -> str:
    """Return unix seconds, or now, as RFC 3339 in UTC with microseconds."""
    time = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
