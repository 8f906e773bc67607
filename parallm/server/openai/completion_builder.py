"""Builds the answers of `POST /v1/completions`, whole and in chunks."""

from collections.abc import Sequence

from parallm.server.generation import UNFINISHED, ResponseContext, provenance
from parallm.server.openai.completion_schemas import (
    CompletionAnswer,
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from parallm.server.openai.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs
from parallm.types import Completion, TokenEvent


class CompletionBuilder:
    """Keeps the number of characters of each streamed choice, for `text_offset`."""

    def __init__(self, context: ResponseContext, body: CompletionBody) -> None:
        self.context = context
        self._body = body
        self._offsets: dict[int, int] = {}

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> CompletionAnswer:
        choices = [
            self._whole_choice(prompt, completion)
            for prompt, group in enumerate(completions)
            for completion in sorted(group, key=lambda completion: completion.index)
        ]
        return self._answer(model, choices, self.context.whole_usage(completions))

    def opening(self, model: str) -> list[CompletionAnswer]:
        if not self._body.echo:
            return []
        choices = [
            CompletionChoice(index=prompt * self._body.n + index, text=text, logprobs=None, **UNFINISHED)
            for prompt, text in enumerate(map(self._prompt_text, range(len(self._body.prompt))))
            for index in range(self._body.n)
        ]
        return [self._answer(model, [choice]) for choice in choices]

    def text_chunk(self, model: str, prompt: int, event: TokenEvent) -> CompletionAnswer | None:
        if not (event.text or (event.tokens and (self.context.logprobs or self.context.token_ids))):
            return None
        index = self.context.choice_index(prompt, event.index)
        offset = self._offsets.get(index)
        logprobs = completion_logprobs(event, self.context.token_texts, offset or 0) if self.context.logprobs else None
        num_characters = sum(map(len, logprobs.tokens)) if logprobs else 0
        self._offsets[index] = (offset or 0) + num_characters
        choice = CompletionChoice(index=index, text=event.text, logprobs=logprobs, **UNFINISHED)
        return self._answer(model, [self._with_ids(choice, event.tokens, None if offset is not None else prompt)])

    def final_chunk(self, model: str, prompt: int, completion: Completion) -> CompletionAnswer:
        index = self.context.choice_index(prompt, completion.index)
        choice = CompletionChoice(index=index, text="", logprobs=None, **provenance(completion))
        return self._answer(model, [choice])

    def usage_chunk(self, model: str, usage: Usage) -> CompletionAnswer:
        return self._answer(model, [], usage)

    def _whole_choice(self, prompt: int, completion: Completion) -> CompletionChoice:
        choice = CompletionChoice(
            index=self.context.choice_index(prompt, completion.index),
            text=self._prompt_text(prompt) + completion.text if self._body.echo else completion.text,
            logprobs=self._logprobs(prompt, completion),
            **provenance(completion),
        )
        count, logprobs = self._body.prompt_logprobs, completion.prompt_logprobs
        if count is not None and logprobs is not None:
            update = {"prompt_logprobs": prompt_logprobs(logprobs, count, self.context.token_texts)}
            choice = choice.model_copy(update=update)
        return self._with_ids(choice, completion.tokens, prompt)

    def _logprobs(self, prompt: int, completion: Completion) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        if not self._body.echo:
            return completion_logprobs(completion, self.context.token_texts, 0)
        first = self.context.requests[prompt].prompt_tokens[0]
        return echoed_logprobs(completion, first, self._body.logprobs, self.context.token_texts)

    def _prompt_text(self, prompt: int) -> str:
        text = self._body.prompt[prompt]
        return text if isinstance(text, str) else self.context.tokenizer.decode(text, special=True)

    def _with_ids(self, choice: CompletionChoice, tokens: Sequence[int], prompt: int | None) -> CompletionChoice:
        if not self.context.token_ids:
            return choice
        update = {"token_ids": list(tokens)}
        if prompt is not None:
            update["prompt_token_ids"] = list(self.context.requests[prompt].prompt_tokens)
        return choice.model_copy(update=update)

    def _answer(self, model: str, choices: list[CompletionChoice], usage: Usage | None = None) -> CompletionAnswer:
        answer = CompletionAnswer(
            id=self.context.answer_id,
            object="text_completion",
            created=self.context.created,
            model=model,
            choices=choices,
        )
        # clients that asked for usage get the field, null, in every other chunk
        return answer.model_copy(update={"usage": usage}) if usage or self.context.usage_chunk else answer
