"""Wire types of what `POST /v1/responses` answers. Used in this folder only."""

from typing import Any, Literal

from parallm.server.openai.response_schemas import ReasoningText
from parallm.server.schemas import Wire

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
    """With what was asked, as OpenAI gives it back, and which weights answered."""

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


class ResponseEvent(Wire):
    """One event of a stream; which fields it has depends on its type."""

    type: str
    sequence_number: int
    response: ResponseAnswer | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputItem | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[Any] | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None
