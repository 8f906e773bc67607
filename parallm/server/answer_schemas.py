"""Wire types of responses. Used in this folder only. A field with a default is left out unless it was set."""

from typing import Literal

from parallm.server.schemas import Wire


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
