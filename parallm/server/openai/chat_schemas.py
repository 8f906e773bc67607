"""Wire types of `POST /v1/chat/completions`, requests and answers."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from parallm.server.openai.completion_schemas import Answer, ChoiceFields, GenerationBody, RankedLogprob
from parallm.server.schemas import FIRST_FAULT, MAX_INT, Wire, text_parts

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
MAX_TOOLS = 128


def read_optional_content(value: object) -> object:
    return [] if value is None else text_parts(value)


class TextPart(Wire):
    type: Literal["text"]
    text: str


ContentForms: TypeAlias = str | list[TextPart]
Content = Annotated[list[TextPart], FIRST_FAULT, BeforeValidator(text_parts, json_schema_input_type=ContentForms)]
OptionalContent = Annotated[
    list[TextPart], FIRST_FAULT, BeforeValidator(read_optional_content, json_schema_input_type=ContentForms | None)
]


class PlainMessage(Wire):
    """`developer` is the newer name of `system`, which templates do not know."""

    role: Literal["system", "developer", "user"]
    content: Content


class CalledFunction(Wire):
    name: Name
    arguments: str


class SentToolCall(Wire):
    """A call of an earlier answer."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Streams have it, so clients that add up their deltas may send it back."""


class AssistantMessage(Wire):
    """The fields that must be null are there because clients send earlier answers back as they got them."""

    role: Literal["assistant"]
    content: OptionalContent = Field(default_factory=list)
    reasoning_content: str | None = None
    tool_calls: list[SentToolCall] | None = None
    refusal: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)
    audio: None = None


class ToolMessage(Wire):
    """The result of a function."""

    role: Literal["tool"]
    content: Content
    tool_call_id: CallId
    name: Name | None = None


ChatMessage = Annotated[PlainMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionTool(Wire):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Wire):
    name: Name


class NamedTool(Wire):
    type: Literal["function"]
    function: NamedFunction


ToolChoiceForms: TypeAlias = Literal["none", "auto", "required"] | NamedTool


def read_tool_choice(value: object) -> object:
    if value in ("none", "auto", "required") or isinstance(value, dict):
        return value
    raise ValueError('should be "none", "auto", "required" or an object that names a function')


class PlainFormat(Wire):
    type: Literal["text", "json_object"]


class JsonSchema(Wire):
    """The schema is enforced, strict or not; the model sees none of it, so its name and description change nothing."""

    name: Name
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(Wire):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    tool_choice: Annotated[
        str | NamedTool, BeforeValidator(read_tool_choice, json_schema_input_type=ToolChoiceForms)
    ] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, such as `enable_thinking`."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Go on inside the last message, which must be the assistant's, instead of answering it."""
    response_format: ResponseFormat | None = None


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


class ChatAnswer(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | None = None
    """Log-probs by position and token id, the prompt's own token first."""


class ChatChunk(Answer):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None
