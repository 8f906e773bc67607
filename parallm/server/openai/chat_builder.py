"""Builds the answers of `POST /v1/chat/completions`, whole and in chunks. There is one prompt."""

import uuid
from collections import defaultdict
from collections.abc import Sequence

from parallm.conversation import ToolCall
from parallm.server.generation import UNFINISHED, Provenance, ResponseContext, provenance
from parallm.server.openai.chat_schemas import (
    AnsweredFunction,
    AnsweredToolCall,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatText,
)
from parallm.server.openai.completion_schemas import Usage
from parallm.server.openai.logprobs import PromptLogprobs, chat_logprobs, prompt_logprobs
from parallm.server.openai.output_parser import MessageParser, MessagePart, OutputParsing, new_parser, parse_whole
from parallm.types import Completion, TokenEvent


class ChatBuilder:
    def __init__(self, context: ResponseContext, parsing: OutputParsing) -> None:
        self.context = context
        self.parsing = parsing
        self._parsers: defaultdict[int, MessageParser] = defaultdict(self._new_parser)

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> ChatAnswer:
        answer = ChatAnswer(
            id=self.context.answer_id,
            object="chat.completion",
            created=self.context.created,
            model=model,
            choices=[
                self._whole_choice(completion)
                for group in completions
                for completion in sorted(group, key=lambda completion: completion.index)
            ],
            usage=self.context.whole_usage(completions),
        )
        return answer.model_copy(update=self._prompt_ids() | self._prompt_logprobs(completions))

    def opening(self, model: str) -> list[ChatChunk]:
        """Build the role of each choice; the first chunk has the prompt's token ids, where asked for."""
        roles = [
            self._chunk(model, ChatChunkChoice(index=index, delta=_ROLE, logprobs=None, **UNFINISHED))
            for index in range(self.context.requests[0].n)
        ]
        return [roles[0].model_copy(update=self._prompt_ids()), *roles[1:]]

    def text_chunk(self, model: str, prompt: int, event: TokenEvent) -> ChatChunk | None:
        part = self._parsers[event.index].read(event.text)
        if not (part or (event.tokens and (self.context.logprobs or self.context.token_ids))):
            return None
        choice = ChatChunkChoice(
            index=event.index,
            delta=self._delta(event.index, part),
            logprobs=chat_logprobs(event, self.context.token_texts) if self.context.logprobs else None,
            **UNFINISHED,
        )
        return self._chunk(model, choice.model_copy(update=self._token_ids(event.tokens)))

    def final_chunk(self, model: str, prompt: int, completion: Completion) -> ChatChunk:
        part = self._parsers[completion.index].finish()
        delta = self._delta(completion.index, part) if part else ChatText()
        num_calls = self._parsers[completion.index].num_calls
        choice = ChatChunkChoice(
            index=completion.index, delta=delta, logprobs=None, **_provenance(completion, num_calls)
        )
        return self._chunk(model, choice)

    def usage_chunk(self, model: str, usage: Usage) -> ChatChunk:
        return self._chunk(model, None, usage)

    def _whole_choice(self, completion: Completion) -> ChatChoice:
        part = parse_whole(self._new_parser(), completion.text)
        choice = ChatChoice(
            index=completion.index,
            message=_message(part),
            logprobs=chat_logprobs(completion, self.context.token_texts) if self.context.logprobs else None,
            **_provenance(completion, len(part.calls)),
        )
        return choice.model_copy(update=self._token_ids(completion.tokens))

    def _new_parser(self) -> MessageParser:
        return new_parser(self.context.tokenizer.output, self.parsing)

    def _delta(self, index: int, part: MessagePart) -> ChatText:
        """Build a delta of a part whose calls the parser has counted already."""
        first = self._parsers[index].num_calls - len(part.calls)
        calls = [_answered(call).model_copy(update={"index": first + n}) for n, call in enumerate(part.calls)]
        return _text(part, calls)

    def _token_ids(self, tokens: Sequence[int]) -> dict[str, list[int]]:
        return {"token_ids": list(tokens)} if self.context.token_ids else {}

    def _prompt_ids(self) -> dict[str, list[int]]:
        return {"prompt_token_ids": list(self.context.requests[0].prompt_tokens)} if self.context.token_ids else {}

    def _prompt_logprobs(self, completions: Sequence[Sequence[Completion]]) -> dict[str, PromptLogprobs]:
        count = self.context.requests[0].sampling.prompt_logprobs
        logprobs = completions[0][0].prompt_logprobs
        if count is None or logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(logprobs, count, self.context.token_texts)}

    def _chunk(self, model: str, choice: ChatChunkChoice | None, usage: Usage | None = None) -> ChatChunk:
        chunk = ChatChunk(
            id=self.context.answer_id,
            object="chat.completion.chunk",
            created=self.context.created,
            model=model,
            choices=[] if choice is None else [choice],
        )
        # clients that asked for usage get the field, null, in every other chunk
        return chunk.model_copy(update={"usage": usage}) if usage or self.context.usage_chunk else chunk


def _message(part: MessagePart) -> ChatText:
    """Build a whole message: its content is null where it only calls functions."""
    text = _text(part, [_answered(call) for call in part.calls])
    return text.model_copy(
        update={"role": "assistant", "content": part.content if part.content or not part.calls else None}
    )


def _text(part: MessagePart, calls: list[AnsweredToolCall]) -> ChatText:
    fields: dict[str, object] = {}
    if part.content or not part:
        fields["content"] = part.content
    if part.reasoning:
        fields["reasoning_content"] = part.reasoning
    if calls:
        fields["tool_calls"] = calls
    return ChatText().model_copy(update=fields)


def _answered(call: ToolCall) -> AnsweredToolCall:
    return AnsweredToolCall(
        id=call.call_id or f"call_{uuid.uuid4().hex[:24]}",
        type="function",
        function=AnsweredFunction(name=call.name, arguments=call.arguments),
    )


def _provenance(completion: Completion, num_calls: int) -> Provenance:
    fields = provenance(completion)
    if num_calls and completion.finish_reason == "stop":
        fields["finish_reason"] = "tool_calls"
    return fields


_ROLE = ChatText(role="assistant", content="")
