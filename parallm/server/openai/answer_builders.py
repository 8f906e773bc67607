"""Builds the answers of `POST /v1/completions` and `POST /v1/chat/completions`, whole and in chunks."""

import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

from parallm.conversation import ToolCall
from parallm.server.catalog import version_of
from parallm.server.generation import ResponseContext, weight_versions
from parallm.server.openai.chat_schemas import (
    AnsweredFunction,
    AnsweredToolCall,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatText,
)
from parallm.server.openai.completion_schemas import (
    Answer,
    ChoiceFields,
    CompletionAnswer,
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from parallm.server.openai.logprobs import chat_logprobs, completion_logprobs, echoed_logprobs, prompt_logprobs
from parallm.server.openai.output_parser import MessageParser, MessagePart, OutputParsing, parse_whole
from parallm.types import Completion, TokenEvent

AnyAnswer = TypeVar("AnyAnswer", bound=Answer)


class AnswerBuilder:
    """The fields that both endpoints share. Optional ones are set only where the request asks for them."""

    def __init__(self, context: ResponseContext) -> None:
        self.context = context
        self._echo = context.body.model_dump(include={"request_id", "step_id"}, exclude_none=True)
        if context.logprobs:
            self._echo["logprobs_mode"] = "temperature"

    def _answer(
        self,
        kind: type[AnyAnswer],
        name: str,
        model: str,
        choices: Sequence[ChoiceFields],
        usage: Usage | None = None,
        **fields: Any,
    ) -> AnyAnswer:
        if usage or self.context.stream_options.include_usage:
            # clients that asked for usage get the field, null, in every other chunk
            fields["usage"] = usage
        answer_id, created = self.context.answer_id, self.context.created
        fields |= self._echo
        return kind(id=answer_id, object=name, created=created, model=model, choices=list(choices), **fields)

    def _is_shown(self, event: TokenEvent) -> bool:
        """Return whether there is a chunk for the event's tokens, although it may have no text."""
        return bool(event.tokens) and (self.context.logprobs or self.context.body.return_token_ids)

    def _ids(self, name: str, tokens: Sequence[int]) -> dict[str, Any]:
        return {name: list(tokens)} if self.context.body.return_token_ids else {}

    def _prompt_logprobs(self, completion: Completion) -> dict[str, Any]:
        count, logprobs = self.context.body.prompt_logprobs, completion.prompt_logprobs
        if count is None or logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(logprobs, count, self.context.token_text)}


class CompletionBuilder(AnswerBuilder):
    """Keeps the number of characters of each streamed choice, for `text_offset`."""

    def __init__(self, context: ResponseContext, body: CompletionBody) -> None:
        super().__init__(context)
        self._body = body
        self._offsets: dict[int, int] = {}

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> CompletionAnswer:
        choices = [
            self._whole_choice(prompt, completion) for prompt, group in enumerate(completions) for completion in group
        ]
        return self._chunk(model, *choices, usage=self.context.whole_usage(completions))

    def opening(self, model: str) -> list[CompletionAnswer]:
        if not self._body.echo:
            return []
        numbered = ((prompt, index) for prompt in range(len(self._body.prompt)) for index in range(self._body.n))
        return [
            self._chunk(model, self._choice(prompt, index, self._prompt_text(prompt))) for prompt, index in numbered
        ]

    def text_chunk(self, model: str, prompt: int, event: TokenEvent) -> CompletionAnswer | None:
        if not (event.text or self._is_shown(event)):
            return None
        index = self.context.choice_index(prompt, event.index)
        is_first, offset = index not in self._offsets, self._offsets.get(index, 0)
        logprobs = completion_logprobs(event, self.context.token_text, offset) if self.context.logprobs else None
        self._offsets[index] = offset + (sum(map(len, logprobs.tokens)) if logprobs else 0)
        ids = self._choice_ids(event.tokens, prompt if is_first else None)
        return self._chunk(model, self._choice(prompt, event.index, event.text, logprobs=logprobs, **ids))

    def final_chunk(self, model: str, prompt: int, completion: Completion) -> CompletionAnswer:
        return self._chunk(model, self._choice(prompt, completion.index, "", **_provenance(completion)))

    def usage_chunk(self, model: str, usage: Usage) -> CompletionAnswer:
        return self._chunk(model, usage=usage)

    def _chunk(self, model: str, *choices: CompletionChoice, usage: Usage | None = None) -> CompletionAnswer:
        return self._answer(CompletionAnswer, "text_completion", model, choices, usage)

    def _choice(self, prompt: int, index: int, text: str, **fields: Any) -> CompletionChoice:
        """Build a choice that goes on, unless `fields` say how it ended."""
        fields = {"logprobs": None, **_provenance(None), **fields}
        return CompletionChoice(index=self.context.choice_index(prompt, index), text=text, **fields)

    def _whole_choice(self, prompt: int, completion: Completion) -> CompletionChoice:
        return self._choice(
            prompt,
            completion.index,
            self._prompt_text(prompt) + completion.text if self._body.echo else completion.text,
            logprobs=self._logprobs(prompt, completion),
            **_provenance(completion),
            **self._choice_ids(completion.tokens, prompt),
            **self._prompt_logprobs(completion),
        )

    def _logprobs(self, prompt: int, completion: Completion) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        if not self._body.echo:
            return completion_logprobs(completion, self.context.token_text, 0)
        first = self.context.requests[prompt].prompt_tokens[0]
        return echoed_logprobs(completion, first, self._body.logprobs, self.context.token_text)

    def _prompt_text(self, prompt: int) -> str:
        text = self._body.prompt[prompt]
        return text if isinstance(text, str) else self.context.tokenizer.decode(text, special=True)

    def _choice_ids(self, tokens: Sequence[int], prompt: int | None) -> dict[str, Any]:
        own = {} if prompt is None else self._ids("prompt_token_ids", self.context.requests[prompt].prompt_tokens)
        return self._ids("token_ids", tokens) | own


class ChatBuilder(AnswerBuilder):
    """There is one prompt."""

    def __init__(self, context: ResponseContext, parsing: OutputParsing) -> None:
        super().__init__(context)
        self.parsing = parsing
        self._parsers: defaultdict[int, MessageParser] = defaultdict(self._new_parser)

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> ChatAnswer:
        (group,) = completions
        choices = [self._whole_choice(completion) for completion in group]
        more = self._prompt_ids() | self._prompt_logprobs(group[0])
        return self._answer(
            ChatAnswer, "chat.completion", model, choices, self.context.whole_usage(completions), **more
        )

    def opening(self, model: str) -> list[ChatChunk]:
        """Build the role of each choice; the first chunk has the prompt's token ids, where asked for."""
        role = ChatText(role="assistant", content="")
        chunks = [self._chunk(model, self._choice(index, role)) for index in range(self.context.requests[0].n)]
        return [chunks[0].model_copy(update=self._prompt_ids()), *chunks[1:]]

    def text_chunk(self, model: str, prompt: int, event: TokenEvent) -> ChatChunk | None:
        part = self._parsers[event.index].read(event.text)
        if not (part or self._is_shown(event)):
            return None
        logprobs = chat_logprobs(event, self.context.token_text) if self.context.logprobs else None
        ids = self._ids("token_ids", event.tokens)
        return self._chunk(model, self._choice(event.index, self._delta(event.index, part), logprobs=logprobs, **ids))

    def final_chunk(self, model: str, prompt: int, completion: Completion) -> ChatChunk:
        index, parser = completion.index, self._parsers[completion.index]
        part = parser.finish()
        delta = self._delta(index, part) if part else ChatText()
        return self._chunk(model, self._choice(index, delta, **_provenance(completion, has_calls=parser.num_calls > 0)))

    def usage_chunk(self, model: str, usage: Usage) -> ChatChunk:
        return self._chunk(model, usage=usage)

    def _chunk(self, model: str, *choices: ChatChunkChoice, usage: Usage | None = None) -> ChatChunk:
        return self._answer(ChatChunk, "chat.completion.chunk", model, choices, usage)

    def _choice(self, index: int, delta: ChatText, **fields: Any) -> ChatChunkChoice:
        """Build a choice that goes on, unless `fields` say how it ended."""
        return ChatChunkChoice(index=index, delta=delta, **{"logprobs": None, **_provenance(None), **fields})

    def _whole_choice(self, completion: Completion) -> ChatChoice:
        part = parse_whole(self._new_parser(), completion.text)
        calls = [_answered(call) for call in part.calls]
        return ChatChoice(
            index=completion.index,
            message=_text(part, calls, role="assistant", content=None if calls else ""),
            logprobs=chat_logprobs(completion, self.context.token_text) if self.context.logprobs else None,
            **_provenance(completion, has_calls=bool(calls)),
            **self._ids("token_ids", completion.tokens),
        )

    def _new_parser(self) -> MessageParser:
        return MessageParser(self.context.tokenizer.output, self.parsing)

    def _delta(self, index: int, part: MessagePart) -> ChatText:
        """Build a delta of a part whose calls the parser has counted already."""
        first = self._parsers[index].num_calls - len(part.calls)
        return _text(part, [_answered(call, index=first + n) for n, call in enumerate(part.calls)])

    def _prompt_ids(self) -> dict[str, Any]:
        return self._ids("prompt_token_ids", self.context.requests[0].prompt_tokens)


def _text(part: MessagePart, calls: list[AnsweredToolCall], **fields: Any) -> ChatText:
    """Build a message or a delta of `fields` and of what the part has; an empty part is an empty content."""
    if part.content or not part:
        fields["content"] = part.content
    if part.reasoning:
        fields["reasoning_content"] = part.reasoning
    if calls:
        fields["tool_calls"] = calls
    return ChatText(**fields)


def _answered(call: ToolCall, **position: int) -> AnsweredToolCall:
    return AnsweredToolCall(
        id=call.call_id or f"call_{uuid.uuid4().hex[:24]}",
        type="function",
        function=AnsweredFunction(name=call.name, arguments=call.arguments),
        **position,
    )


def _provenance(completion: Completion | None, *, has_calls: bool = False) -> dict[str, Any]:
    """Return how a choice ended and which weights made it; null as long as it goes on."""
    if completion is None:
        return {"finish_reason": None, "policy_version": None, "weight_versions": None}
    calls = has_calls and completion.finish_reason == "stop"
    return {
        "finish_reason": "tool_calls" if calls else completion.finish_reason,
        "policy_version": version_of(completion),
        "weight_versions": weight_versions(completion),
    }
