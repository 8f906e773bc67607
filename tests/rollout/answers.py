"""Fake engines that answer at once."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from parallm.rollout.runner import Generate
from parallm.types import Completion, GenerationRequest


def one_by_one(generate_all: Callable[[Sequence[GenerationRequest]], Awaitable[list[list[Completion]]]]) -> Generate:
    """The completions that `generate_all` returns, each with the index of its request."""

    async def generate(requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, Completion], None]:
        for index, completions in enumerate(await generate_all(requests)):
            for completion in completions:
                yield index, completion

    return generate
