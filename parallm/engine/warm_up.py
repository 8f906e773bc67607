"""Work whose answers nobody reads, so that what is made once for each number of rows is made before clients come."""

import time
import uuid
from collections.abc import Awaitable, Callable

from parallm.types import GenerationRequest, SamplingParams

PROMPT_TOKENS = 64
TOKENS = 4
"""Of each completion: the first comes from the prompt, and the others from steps."""


async def warm_up(
    generate: Callable[[GenerationRequest], Awaitable[object]],
    token: int,
    *,
    model: str,
    rows: int,
    prompt_tokens: int = PROMPT_TOKENS,
) -> dict[int, float]:
    """Generate for 1, 2, 4 and more rows up to `rows` after prompts of `token`; seconds by the number of rows.

    No later prompt begins as these do. Raises as `AsyncEngine.generate` does.
    """
    seconds = {}
    for count in row_counts(rows):
        began = time.perf_counter()
        await generate(_request([token] * prompt_tokens, count, model))
        seconds[count] = round(time.perf_counter() - began, 6)
    return seconds


def row_counts(most: int) -> list[int]:
    """Powers of two below `most`, and `most`."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def _request(prompt: list[int], rows: int, model: str) -> GenerationRequest:
    name = uuid.uuid4().hex
    return GenerationRequest(
        request_id=f"warmup-{name}",
        prompt_tokens=tuple(prompt),
        sampling=SamplingParams(max_tokens=TOKENS, ignore_eos=True),
        n=rows,
        model=model,
        is_continued=False,
        cache_salt=name,  # else the second prompt would be known from the first
    )
