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
    Raises as `AsyncEngine.generate` does."""
    seconds = {}
    for count in [*(2**power for power in range(rows.bit_length()) if 2**power < rows), rows]:
        began = time.perf_counter()
        name = uuid.uuid4().hex
        request = GenerationRequest(
            request_id=f"warmup-{name}",
            prompt_tokens=(token,) * prompt_tokens,
            sampling=SamplingParams(max_tokens=TOKENS, ignore_eos=True),
            n=count,
            model=model,
            is_continued=False,
            cache_salt=name,  # so that no prompt hits the prefix cache
        )
        await generate(request)
        seconds[count] = round(time.perf_counter() - began, 6)
    return seconds
