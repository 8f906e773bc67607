"""Wire types of `POST /v1/responses`, requests and answers."""

from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from parallm.server.openai.chat_schemas import (
    MAX_TOOLS,
    CallId,
    Effort,
    FunctionTool,
    JsonSchema,
    Name,
    NamedFunction,
    PlainFormat,
)
from parallm.server.schemas import FIRST_FAULT, MAX_INT, Wire, text_parts

ItemId = Annotated[str, Field(max_length=256)]


class InputText(Wire):
    """Text of the client, or `output_text` of an earlier answer with its fields."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(default=None, max_length=0)
    logprobs: list[Any] | None = None


PartForms: TypeAlias = str | list[InputText]


class InputItem(Wire):
    """The id and status of an answer's item are accepted: clients send items back as they got them."""

    id: ItemId | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class InputMessage(InputItem):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[InputText],
        FIRST_FAULT,
        BeforeValidator(partial(text_parts, kind="input_text"), json_schema_input_type=PartForms),
    ]


class InputCall(InputItem):
    type: Literal["function_call"]
    call_id: CallId
    name: Name
    arguments: str


class InputCallOutput(InputItem):
    type: Literal["function_call_output"]
    call_id: CallId
    output: str


class ReasoningText(Wire):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(InputItem):
    type: Literal["reasoning"]
    summary: list[Any] = Field(default_factory=list, max_length=0)
    content: list[ReasoningText] = Field(default_factory=list)
    encrypted_content: None = None


AnyInput = Annotated[InputMessage | InputCall | InputCallOutput | InputReasoning, Field(discriminator="type")]


InputForms: TypeAlias = str | list[AnyInput]


def read_input(value: object) -> object:
    """A string is one message of the user; messages in a list need no type."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("should be a string or a list of items")
    return [{"type": "message"} | item if isinstance(item, dict) else item for item in value]


class ResponseTool(FunctionTool):
    type: Literal["function"]


class ResponseNamedTool(NamedFunction):
    type: Literal["function"]


class ResponseSchemaFormat(JsonSchema):
    type: Literal["json_schema"]


TextConfigFormat = Annotated[PlainFormat | ResponseSchemaFormat, Field(discriminator="type")]


class TextConfig(Wire):
    format: TextConfigFormat = PlainFormat(type="text")
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Wire):
    effort: Effort | None = None
    summary: None = None
    generate_summary: None = None


class ResponseStreamOptions(Wire):
    include_obfuscation: Literal[False] = False


class ResponseBody(Wire):
    """`POST /v1/responses`. Nothing is stored: each request holds the whole conversation."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: Annotated[
        list[AnyInput],
        Field(min_length=1),
        FIRST_FAULT,
        BeforeValidator(read_input, json_schema_input_type=InputForms),
    ]
    lora_adapter: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """The same as in `/v1/completions`."""
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ResponseNamedTool = "auto"
    parallel_tool_calls: bool = True
    metadata: Annotated[dict[str, str], Field(max_length=16)] = Field(default_factory=dict)
    """Comes back in the answer."""
    store: Literal[False] = False
    user: str | None = None
    """The same as in `/v1/completions`."""
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    """This and `prompt_cache_key` change nothing in an answer."""


Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Wire):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(Wire):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(Wire):
    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(Wire):
    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(Wire):
    cached_tokens: int


class OutputDetails(Wire):
    reasoning_tokens: int


class ResponseUsage(Wire):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Wire):
    reason: Literal["max_output_tokens"]


class ResponseAnswer(Wire):
    """An answer repeats the request's fields, as OpenAI's does, and names the version that answered."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    policy_version: int | None


class ResponseEvent(Wire, extra="allow"):
    """One event of a stream; which other fields it has depends on its type."""

    type: str
    sequence_number: int
