"""Whether rows of a model that keeps states can share a step, and prompts a forward: tried, since no class or name says
it.

Two short prompts are computed alone. The second joins after a step of the first, and goes on alone when the first has
left. Both must have the hidden states that they have alone, in mlx-lm's own caches, as far as rounding allows: another
pass of the same tokens, at once and without steps, shows how far that is. A Qwen3.5 of 24 layers with random weights
computes up to 0.17 away from float32 in bfloat16, and a step of two rows may be other products than a step of one.

Axes: R rows, H hidden.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from parallm.engine.kv.shapes import BufferShape
from parallm.engine.kv.slot_manager import SlotManager
from parallm.model.attention import MIN_ROWS
from parallm.model.patches.recurrence import padding
from parallm.model.shared_model import SharedModel, leaves

PROMPTS = ((3, 1, 4, 1, 5, 9, 2), (2, 7, 1))
TOKENS = ((6, 5, 3), (8, 2, 8))
"""The tokens of each row's steps after its prompt."""
RUNNING = ((0,), (0, 1), (0, 1), (1,))
"""Rows of each step."""
ALLOWED, ALLOWED_16_BITS = 1e-3, 0.1
"""Relative difference of hidden states that every model may have. In 16 bits a router may choose another expert."""
OF_ROUNDING = 4
"""A model may also have this many times the difference that rounding alone makes."""
MAX_ALLOWED = 0.5
"""The most that a model may have: the state of another row, or of the step before, leaves an error of about 1."""

Computed = Callable[[SharedModel], Sequence[tuple[list[Any], int]]]
"""Computes the prompts; returns the cache of each, and its row there."""

logger = logging.getLogger(__name__)


def shares_steps(model: SharedModel) -> bool:
    """Whether rows of a model that is not batch-invariant can share a step; logs why not."""
    if not model.has_states:
        logger.info(
            "%s runs row by row: rows of %s keep more than plain keys, values and states, or need one common offset",
            *(model.name, model.model_type),
        )
        return False
    try:
        error, allowed = measure(model)
    except (AssertionError, AttributeError, IndexError, TypeError, ValueError) as failure:  # what a layer cannot take
        logger.info("%s runs row by row: its layers do not take states of several rows: %s", model.name, failure)
        return False
    if error <= allowed:
        return True
    logger.info(
        "%s runs row by row: hidden states of rows together differ by %.1e from those alone; rounding allows %.1e",
        *(model.name, error, allowed),
    )
    return False


def pads_prompts(model: SharedModel) -> bool:
    """Whether prompts of a model with states can be rows of one forward, the shorter ones padded behind; if not, each
    is computed alone."""
    if not model.has_states or not all(
        isinstance(layer, KVCache | ArraysCache) for layer in leaves(model.make_cache())
    ):
        return False
    try:
        error, allowed = measure(model, _computed_together)
    except (AssertionError, AttributeError, IndexError, TypeError, ValueError) as failure:
        logger.info("%s computes prompts one by one: its layers do not take padding: %s", model.name, failure)
        return False
    if error <= allowed:
        return True
    logger.info("%s computes prompts one by one: states differ by %.1e behind padding", model.name, error)
    return False


def measure(model: SharedModel, computed: Computed | None = None) -> tuple[float, float]:
    """The largest relative difference between the rows' hidden states together and alone, and what is allowed.

    `computed`: how prompts are, by default each in a forward of its own."""
    alone, prompts = mx.stack(_alone(model)), (computed or _computed_alone)(model)
    least = ALLOWED if model.dtype == mx.float32 else ALLOWED_16_BITS
    rounding = _difference(mx.stack(_at_once(model)), alone)
    return _difference(mx.stack(_together(model, prompts)), alone), min(MAX_ALLOWED, max(least, OF_ROUNDING * rounding))


def _difference(found_NH: mx.array, expected_NH: mx.array) -> float:
    """The largest norm of a difference, by the norm of what is expected; infinite for NaN."""
    found_NH, expected_NH = found_NH.astype(mx.float32), expected_NH.astype(mx.float32)
    norms_N = mx.linalg.norm(found_NH - expected_NH, axis=-1) / mx.linalg.norm(expected_NH, axis=-1)
    largest: float = norms_N.max().item()
    return largest if largest == largest else float("inf")


def _at_once(model: SharedModel) -> list[mx.array]:
    """Hidden states (H,) of each row's tokens from one forward of its prompt and them."""
    hidden = []
    for prompt, tokens in zip(PROMPTS, TOKENS, strict=True):
        hidden += list(model.hidden(mx.array([[*prompt, *tokens]]), model.make_cache(), None)[0, len(prompt) :])
    return hidden


def _alone(model: SharedModel) -> list[mx.array]:
    """Hidden states (H,) of each row's steps in turn."""
    hidden = []
    for prompt, tokens in zip(PROMPTS, TOKENS, strict=True):
        cache = make_prompt_cache(model.base)
        model.hidden(mx.array([prompt]), cache, None)
        hidden += [model.hidden(mx.array([[token]]), cache, None)[0, 0] for token in tokens]
    return hidden


def _together(model: SharedModel, prompts: Sequence[tuple[list[Any], int]]) -> list[mx.array]:
    """The same with both rows in slots; `prompts`: the cache of each computed one, and its row there."""
    slots = SlotManager(model.make_cache())
    slots.resize(BufferShape(MIN_ROWS, len(PROMPTS[0]) + len(TOKENS[0]) + 1))
    hidden: list[list[mx.array]] = [[] for _ in PROMPTS]
    present: list[int] = []
    for running in RUNNING:
        for row in running:
            if row not in present:
                cache, place = prompts[row]
                slots.join(cache, [place], [len(PROMPTS[row])])
                present.append(row)
        if len(running) < len(present):
            slots.leave([(0, 1)], [len(PROMPTS[1]) + len(hidden[1])], 1, waits=False)
            present = [1]
        step_RH = _step(model, slots, [(PROMPTS[row], TOKENS[row], len(hidden[row])) for row in present])
        mx.eval(step_RH)  # kernels write into slots in place, so that a step must not begin before the last one ends
        for index, row in enumerate(present):
            hidden[row].append(step_RH[index])
    return [*hidden[0], *hidden[1]]


def _computed_alone(model: SharedModel) -> list[tuple[list[Any], int]]:
    """Each prompt in a forward of its own."""
    caches = [model.make_cache() for _ in PROMPTS]
    for prompt, cache in zip(PROMPTS, caches, strict=True):
        model.hidden(mx.array([prompt]), cache, None)
    return [(cache, 0) for cache in caches]


def _computed_together(model: SharedModel) -> list[tuple[list[Any], int]]:
    """All prompts in one forward, with padding behind the shorter ones."""
    cache, lengths = model.make_cache(), [len(prompt) for prompt in PROMPTS]
    width = max(lengths)
    rows = [[*prompt, *[0] * (width - len(prompt))] for prompt in PROMPTS]
    with padding(leaves(cache), lengths, width):
        model.hidden(mx.array(rows), cache, None)
    return [(cache, row) for row in range(len(PROMPTS))]


def _step(model: SharedModel, slots: SlotManager, rows: Sequence[tuple[Sequence[int], Sequence[int], int]]) -> mx.array:
    """A step of rows with (prompt, tokens, number of tokens fed before), (R, H)."""
    num_fillers = MIN_ROWS - len(rows)
    slots.begin_step([len(prompt) + num_fed for prompt, _, num_fed in rows] + [0] * num_fillers)
    slots.begin_states(len(rows), MIN_ROWS)
    fed = [tokens[num_fed] for _, tokens, num_fed in rows] + [0] * num_fillers
    hidden_RH = model.hidden(mx.array(fed)[:, None], slots.caches, None)[:, 0]
    slots.end_states(len(rows))
    return hidden_RH
