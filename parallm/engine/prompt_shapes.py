"""How many positions a forward computes for so many tokens of a prompt, and how many are allocated.

On a CPU as many as there are tokens, and enough for products with exact numbers. With MLX's CUDA build lengths come in
few sizes: MLX makes a plan of cuDNN's attention for each new shape, strides included, and keeps 256 of them. Under a
load of all lengths each forward of prompts took some 50 ms however short (one H200, 8B, 2026-11-21), as long as 2,048
tokens need; that plans are why is read from MLX's source, and has not been timed apart. The positions behind a prompt's
end are seen by nobody.
"""

from parallm.engine.layout import in_quarters
from parallm.model.attention import LEAST_ROWS
from parallm.model.cuda import on_cuda

STEP = 128


def padded(num_tokens: int) -> int:
    """Positions that are computed: on CUDA multiples of 128, and beyond 1,024 four sizes for each doubling."""
    return in_quarters(STEP, num_tokens) if on_cuda() else max(LEAST_ROWS, num_tokens)


def allocated(num_tokens: int) -> int:
    """Positions of the keys and values of a prompt that is computed."""
    return in_quarters(STEP, num_tokens) if on_cuda() else num_tokens + LEAST_ROWS


def reusable(num_known: int) -> int:
    """Of so many tokens that are known from before, those behind which the rest is computed."""
    return num_known // STEP * STEP if on_cuda() else num_known
