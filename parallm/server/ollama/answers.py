"""Ollama's answers of one completion: an object, or lines of JSON, the last of which has the measured times."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

from starlette.requests import Request

from parallm.conversation import ToolCall
from parallm.server.catalog import version_of
from parallm.server.failures import failure_of
from parallm.server.generation import Events, NumberedEvent, ResponseContext
from parallm.server.ollama.schemas import (
    AnsweredCall,
    AnsweredFunction,
    AnsweredMessage,
    AnswerFields,
    LikelyToken,
    OllamaChatAnswer,
    OllamaError,
    OllamaGenerateAnswer,
    SampledToken,
    timestamp,
)
from parallm.server.openai.logprobs import chat_logprobs
from parallm.server.openai.output_parser import MessageParser, MessagePart, OutputParsing, parse_whole
from parallm.server.schemas import Wire
from parallm.types import Completion, TokenEvent

LOAD_SECONDS = "parallm.load_seconds"
"""Key in the ASGI scope of a request for a model that is loaded and unloaded at need: how long it waited for that."""
NANOSECONDS = 1_000_000_000
Kind = Literal["generate", "chat"]


class Clock:
    """Measures one request. Made when it has come."""

    def __init__(self, http: Request) -> None:
        self._came = self._asked = time.perf_counter()
        self._first: float | None = None
        self._last = self._came
        self._load_seconds: float = http.scope.get(LOAD_SECONDS, 0.0)

    def ask(self) -> None:
        """Note that the request goes to the engine."""
        self._asked = time.perf_counter()

    def count(self) -> None:
        """Note that tokens have come."""
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last

    def durations(self) -> dict[str, int]:
        """Return nanoseconds by field, without those that are 0."""
        first = self._last if self._first is None else self._first
        seconds = {
            "total_duration": time.perf_counter() - self._came + self._load_seconds,
            "load_duration": self._load_seconds,
            "prompt_eval_duration": first - self._asked,
            "eval_duration": self._last - first,
        }
        return {name: number for name, value in seconds.items() if (number := int(value * NANOSECONDS)) > 0}


class OllamaBuilder:
    """Builds the answers of one request; `parsing` is None where its text is plain."""

    def __init__(
        self, context: ResponseContext, kind: Kind, name: str, clock: Clock, parsing: OutputParsing | None
    ) -> None:
        self.context = context
        self._kind = kind
        self._name = name
        self._clock = clock
        self._parser = None if parsing is None else MessageParser(context.tokenizer.output, parsing)
        self._num_calls = 0

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> AnswerFields:
        ((completion,),) = completions
        part = _plain(completion.text) if self._parser is None else parse_whole(self._parser, completion.text)
        return self._line(part, **self._logprobs(completion), **self._end(completion))

    def lines(self, event: TokenEvent) -> list[AnswerFields]:
        """Return the lines that an event adds to a stream."""
        if event.tokens:
            self._clock.count()
        part = _plain(event.text) if self._parser is None else self._parser.read(event.text)
        logprobs = self._logprobs(event)
        lines = [self._line(part, done=False, **logprobs)] if part or (logprobs and event.tokens) else []
        if event.completion is not None:
            if self._parser is not None and (rest := self._parser.finish()):
                lines.append(self._line(rest, done=False))
            lines.append(self._line(MessagePart(), **self._end(event.completion)))
        return lines

    def _line(self, part: MessagePart, **fields: Any) -> AnswerFields:
        fields = {"model": self._name, "created_at": timestamp(), **fields}
        shown: dict[str, Any] = {"thinking": part.reasoning} if part.reasoning else {}
        if self._kind == "generate":
            return OllamaGenerateAnswer(response=part.content, **shown, **fields)
        if part.calls:
            shown["tool_calls"] = [self._call(call) for call in part.calls]
        return OllamaChatAnswer(message=AnsweredMessage(role="assistant", content=part.content, **shown), **fields)

    def _call(self, call: ToolCall) -> AnsweredCall:
        self._num_calls += 1
        function = AnsweredFunction(
            index=self._num_calls - 1, name=call.name, arguments=json.loads(call.arguments or "{}")
        )
        return AnsweredCall(id=call.call_id or f"call_{uuid.uuid4().hex[:8]}", function=function)

    def _end(self, completion: Completion) -> dict[str, Any]:
        prompt = self.context.requests[0].prompt_tokens
        version = version_of(completion)
        fields: dict[str, Any] = {
            "done": True,
            "done_reason": completion.finish_reason,
            **self._clock.durations(),
            "prompt_eval_count": len(prompt),
            "eval_count": len(completion.tokens),
        }
        if version:
            fields["policy_version"] = version
        if self._kind == "generate" and self._parser is not None:
            fields["context"] = [*prompt, *completion.tokens]
        return fields

    def _logprobs(self, source: TokenEvent | Completion) -> dict[str, Any]:
        if not self.context.logprobs:
            return {}
        tokens = chat_logprobs(source, self.context.token_text).content
        return {
            "logprobs": [
                SampledToken(
                    **token.model_dump(include={"token", "logprob", "bytes"}),
                    top_logprobs=[LikelyToken(**likely.model_dump()) for likely in token.top_logprobs],
                )
                for token in tokens
            ]
        }


class LineStream:
    """Writes one answer as lines of JSON."""

    def __init__(self, builder: OllamaBuilder) -> None:
        self._builder = builder

    async def encode(self, model: str, first: NumberedEvent, events: Events) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of the answer."""
        if lines := self._builder.lines(first[1]):
            yield encode_lines(lines)
        async for _, event in events:
            if lines := self._builder.lines(event):
                yield encode_lines(lines)

    def failed(self, error: Exception) -> bytes:
        """Return the last line of a stream that cannot go on."""
        return encode_lines([OllamaError(error=failure_of(error).message)])


def encode_lines(lines: Sequence[Wire]) -> bytes:
    return b"".join(line.model_dump_json(exclude_unset=True).encode() + b"\n" for line in lines)


def _plain(text: str) -> MessagePart:
    return MessagePart([("text", text)] if text else [])
