"""Answers of `POST /v1/responses`: one completion as a list of items, whole and as events."""

import uuid
from collections.abc import Sequence

from parallm.conversation import ToolCall
from parallm.server.answers import Head, version_of
from parallm.server.openai.forced_calls import new_reader
from parallm.server.openai.message_reader import MessagePart, Reading, read_whole
from parallm.server.openai.response_answer_schemas import (
    IncompleteDetails,
    InputDetails,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ResponseAnswer,
    ResponseUsage,
    Status,
)
from parallm.server.openai.response_schemas import ReasoningText, ResponseBody
from parallm.types import Completion


class ResponseAnswers:
    def __init__(self, head: Head, reading: Reading, body: ResponseBody) -> None:
        self.head = head
        self.reading = reading
        self._body = body

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> ResponseAnswer:
        ((completion,),) = completions
        part = read_whole(new_reader(self.head.tokenizer.output, self.reading), completion.text)
        return self.finished(model, completion, items_of(part, status_of(completion)))

    def begun(self, model: str) -> ResponseAnswer:
        """The answer before its first item."""
        return self._answer(model, "in_progress", [])

    def finished(self, model: str, completion: Completion, items: list[OutputItem]) -> ResponseAnswer:
        reasoning = "".join(part.text for item in items if isinstance(item, OutputReasoning) for part in item.content)
        told = self.head.usage(len(completion.tokens))
        usage = ResponseUsage(
            input_tokens=told.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=completion.num_cached_prompt_tokens),
            output_tokens=told.completion_tokens,
            output_tokens_details=OutputDetails(
                reasoning_tokens=len(self.head.tokenizer.encode(reasoning)) if reasoning else 0
            ),
            total_tokens=told.total_tokens,
        )
        return self._answer(model, status_of(completion), items, completion, usage)

    def _answer(
        self,
        model: str,
        status: Status,
        output: list[OutputItem],
        completion: Completion | None = None,
        usage: ResponseUsage | None = None,
    ) -> ResponseAnswer:
        body = self._body
        is_cut = completion is not None and completion.finish_reason == "length"
        return ResponseAnswer(
            id=self.head.answer_id,
            object="response",
            created_at=self.head.created,
            status=status,
            error=None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata,
            model=model,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls,
            previous_response_id=None,
            reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            store=False,
            temperature=body.temperature,
            text={"format": body.text.format.model_dump(by_alias=True, exclude_unset=True)},
            tool_choice=body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
            tools=[tool.model_dump() for tool in body.tools],
            top_p=body.top_p,
            truncation="disabled",
            usage=usage,
            user=body.user,
            policy_version=None if completion is None else version_of(completion),
        )


def status_of(completion: Completion) -> Status:
    """An answer that was aborted is incomplete too, without details: OpenAI has no reason of this kind."""
    return "incomplete" if completion.finish_reason in ("length", "abort") else "completed"


def items_of(part: MessagePart, status: Status) -> list[OutputItem]:
    """There is a message, perhaps an empty one, unless there is something else."""
    items: list[OutputItem] = []
    if part.reasoning:
        items.append(reasoning_item(new_id("rs"), part.reasoning, status))
    if part.content or not part:
        items.append(message_item(new_id("msg"), part.content, status))
    return [*items, *(call_item(new_id("fc"), call, status) for call in part.calls)]


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def text_part(text: str) -> OutputText:
    return OutputText(type="output_text", text=text, annotations=[], logprobs=[])


def reasoning_item(item_id: str, text: str | None, status: Status) -> OutputReasoning:
    content = [] if text is None else [ReasoningText(type="reasoning_text", text=text)]
    return OutputReasoning(type="reasoning", id=item_id, status=status, summary=[], content=content)


def message_item(item_id: str, text: str | None, status: Status) -> OutputMessage:
    content = [] if text is None else [text_part(text)]
    return OutputMessage(type="message", id=item_id, status=status, role="assistant", content=content)


def call_item(item_id: str, call: ToolCall, status: Status) -> OutputCall:
    return OutputCall(
        type="function_call",
        id=item_id,
        status=status,
        call_id=call.call_id or f"call_{uuid.uuid4().hex[:24]}",
        name=call.name,
        arguments=call.arguments,
    )
