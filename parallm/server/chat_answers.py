"""Answers of `POST /v1/chat/completions`. There is one prompt."""

from collections.abc import Sequence

from parallm.server.answer_schemas import ChatAnswer, ChatChoice, ChatChunk, ChatChunkChoice, ChatText, Usage
from parallm.server.answers import UNFINISHED, Head, num_tokens, provenance
from parallm.server.logprobs import chat_logprobs
from parallm.server.prompt_answers import PromptLogprobs, prompt_logprobs
from parallm.types import Completion, TokenEvent


class ChatAnswers:
    def __init__(self, head: Head) -> None:
        self.head = head

    def whole(self, model: str, completions: Sequence[Sequence[Completion]]) -> ChatAnswer:
        answer = ChatAnswer(
            id=self.head.answer_id,
            object="chat.completion",
            created=self.head.created,
            model=model,
            choices=[
                self._whole_choice(completion)
                for group in completions
                for completion in sorted(group, key=lambda completion: completion.index)
            ],
            usage=self.head.usage(num_tokens(completions)),
        )
        return answer.model_copy(update=self._prompt_ids() | self._prompt_logprobs(completions))

    def opening(self, model: str) -> list[ChatChunk]:
        """The role of each choice; the first chunk has the prompt's token ids, where asked for."""
        roles = [
            self._chunk(model, ChatChunkChoice(index=index, delta=_ROLE, logprobs=None, **UNFINISHED))
            for index in range(self.head.requests[0].n)
        ]
        return [roles[0].model_copy(update=self._prompt_ids()), *roles[1:]]

    def text_chunk(self, model: str, prompt: int, event: TokenEvent) -> ChatChunk | None:
        if not (event.text or (event.tokens and (self.head.logprobs or self.head.token_ids))):
            return None
        choice = ChatChunkChoice(
            index=event.index,
            delta=ChatText(content=event.text),
            logprobs=chat_logprobs(event, self.head.tokenizer) if self.head.logprobs else None,
            **UNFINISHED,
        )
        return self._chunk(model, choice.model_copy(update=self._token_ids(event.tokens)))

    def final_chunk(self, model: str, prompt: int, completion: Completion) -> ChatChunk:
        choice = ChatChunkChoice(index=completion.index, delta=ChatText(), logprobs=None, **provenance(completion))
        return self._chunk(model, choice)

    def usage_chunk(self, model: str, num_completion_tokens: int) -> ChatChunk:
        return self._chunk(model, None, self.head.usage(num_completion_tokens))

    def _whole_choice(self, completion: Completion) -> ChatChoice:
        choice = ChatChoice(
            index=completion.index,
            message=ChatText(role="assistant", content=completion.text),
            logprobs=chat_logprobs(completion, self.head.tokenizer) if self.head.logprobs else None,
            **provenance(completion),
        )
        return choice.model_copy(update=self._token_ids(completion.tokens))

    def _token_ids(self, tokens: Sequence[int]) -> dict[str, list[int]]:
        return {"token_ids": list(tokens)} if self.head.token_ids else {}

    def _prompt_ids(self) -> dict[str, list[int]]:
        return {"prompt_token_ids": list(self.head.requests[0].prompt_tokens)} if self.head.token_ids else {}

    def _prompt_logprobs(self, completions: Sequence[Sequence[Completion]]) -> dict[str, PromptLogprobs]:
        most = self.head.requests[0].sampling.prompt_logprobs
        told = completions[0][0].prompt_logprobs
        if most is None or told is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(told, most, self.head.tokenizer)}

    def _chunk(self, model: str, choice: ChatChunkChoice | None, usage: Usage | None = None) -> ChatChunk:
        chunk = ChatChunk(
            id=self.head.answer_id,
            object="chat.completion.chunk",
            created=self.head.created,
            model=model,
            choices=[] if choice is None else [choice],
        )
        # clients that asked for usage get the field, null, in every other chunk
        return chunk.model_copy(update={"usage": usage}) if usage or self.head.usage_chunk else chunk


_ROLE = ChatText(role="assistant", content="")
