"""The served model as a judge of completions, for environments that ask it. Made by the wiring of a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.rollout.runner import GenerateAll
from parallm.types import BASE, GenerationRequest, Message, SamplingParams


@dataclass(frozen=True, slots=True)
class Judge:
    """The `Ask` of environments. It samples greedily, so the same question gets the same answer."""

    generate_all: GenerateAll
    tokenizer: ChatTokenizer
    numbers: Iterator[int] = field(default_factory=count)

    async def __call__(self, messages: Sequence[Message], *, model: str = BASE, max_tokens: int = 64) -> str:
        """Raises what generating raises."""
        request = GenerationRequest(
            request_id=f"judge-{next(self.numbers)}",
            prompt_tokens=self.tokenizer.encode_chat(messages),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            model=model,
            traffic="rollout",
            is_continued=False,
        )
        ((completion,),) = await self.generate_all([request])
        return completion.text
