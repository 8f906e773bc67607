"""Warm-up requests, so that what is compiled or planned for each number of rows is made before clients come.

`run/runtime.py` calls it at the start, `POST /v1/warmup` later.
"""

import time
import uuid
from collections.abc import Awaitable, Callable

from parallm.types import GenerationRequest, SamplingParams

PROMPT_TOKENS = 64
TOKENS = 4
"""Tokens of a completion: the first comes from the prompt, and the others from steps."""


async def warm_up(
    generate: Callable[[GenerationRequest], Awaitable[object]],
    token: int,
    *,
    model: str,
    rows: int,
    prompt_tokens: int = PROMPT_TOKENS,
) -> dict[int, float]:
    """Generate for 1, 2, 4 and more rows up to `rows` after prompts of `token`; returns seconds by number of rows.

    Raises as `AsyncEngine.generate` does.
    """
    seconds = {}
    for count in [*(2**power for power in range(rows.bit_length()) if 2**power < rows), rows]:
        began = time.perf_counter()
        await generate(_request([token] * prompt_tokens, count, model))
        seconds[count] = round(time.perf_counter() - began, 6)
    return seconds


def _request(prompt: list[int], rows: int, model: str) -> GenerationRequest:
    name = uuid.uuid4().hex
    return GenerationRequest(
        request_id=f"warmup-{name}",
        prompt_tokens=tuple(prompt),
        sampling=SamplingParams(max_tokens=TOKENS, ignore_eos=True),
        n=rows,
        model=model,
        is_continued=False,
        cache_salt=name,  # so that no prompt hits the prefix cache
    )
