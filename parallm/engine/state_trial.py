"""Whether rows of a model that keeps states can share a step: tried, since no class or name says it.

Two short prompts are computed alone. The second joins after a step of the first, and goes on alone when the first has
left. Both must have the hidden states that they have alone, in mlx-lm's own caches.

Axes: R rows, H hidden.
"""

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from parallm.engine.kv.shapes import BufferShape
from parallm.engine.kv.slot_manager import SlotManager
from parallm.model.attention import MIN_ROWS
from parallm.model.shared_model import SharedModel

PROMPTS = ((3, 1, 4, 1, 5, 9, 2), (2, 7, 1))
TOKENS = ((6, 5, 3), (8, 2, 8))
"""The tokens of each row's steps after its prompt."""
RUNNING = ((0,), (0, 1), (0, 1), (1,))
"""Rows of each step."""
MAX_ERROR, MAX_ERROR_16_BITS = 1e-3, 0.1
"""Relative difference of hidden states. In 16 bits a router may choose another expert; the state of another row, or of
the step before, leaves an error of about 1."""

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
        error = _error(model)
    except (AssertionError, AttributeError, IndexError, TypeError, ValueError) as failure:  # what a layer cannot take
        logger.info("%s runs row by row: its layers do not take states of several rows: %s", model.name, failure)
        return False
    if error <= (MAX_ERROR if model.dtype == mx.float32 else MAX_ERROR_16_BITS):
        return True
    logger.info("%s runs row by row: hidden states of rows together differ by %.1e from those alone", model.name, error)
    return False


def _error(model: SharedModel) -> float:
    """The largest relative difference between the rows' hidden states together and alone."""
    alone, together = mx.stack(_alone(model)), mx.stack(_together(model))
    difference = mx.linalg.norm((together - alone).astype(mx.float32), axis=-1)
    error: float = (difference / mx.linalg.norm(alone.astype(mx.float32), axis=-1)).max().item()
    return error if error == error else float("inf")


def _alone(model: SharedModel) -> list[mx.array]:
    """Hidden states (H,) of each row's steps in turn."""
    hidden = []
    for prompt, tokens in zip(PROMPTS, TOKENS, strict=True):
        cache = make_prompt_cache(model.base)
        model.hidden(mx.array([prompt]), cache, None)
        hidden += [model.hidden(mx.array([[token]]), cache, None)[0, 0] for token in tokens]
    return hidden


def _together(model: SharedModel) -> list[mx.array]:
    """The same with both rows in slots."""
    slots = SlotManager(model.make_cache())
    slots.resize(BufferShape(MIN_ROWS, len(PROMPTS[0]) + len(TOKENS[0]) + 1))
    hidden: list[list[mx.array]] = [[] for _ in PROMPTS]
    present: list[int] = []
    for running in RUNNING:
        for row in running:
            if row not in present:
                slots.join(_computed(model, PROMPTS[row]), [0], [len(PROMPTS[row])])
                present.append(row)
        if len(running) < len(present):
            slots.leave([(0, 1)], [len(PROMPTS[1]) + len(hidden[1])], 1, waits=False)
            present = [1]
        step_RH = _step(model, slots, [(PROMPTS[row], TOKENS[row], len(hidden[row])) for row in present])
        for index, row in enumerate(present):
            hidden[row].append(step_RH[index])
    return [*hidden[0], *hidden[1]]


def _computed(model: SharedModel, prompt: Sequence[int]) -> list[Any]:
    cache = model.make_cache()
    model.hidden(mx.array([prompt]), cache, None)
    return cache


def _step(model: SharedModel, slots: SlotManager, rows: Sequence[tuple[Sequence[int], Sequence[int], int]]) -> mx.array:
    """A step of rows with (prompt, tokens, number of tokens fed before), (R, H)."""
    num_fillers = MIN_ROWS - len(rows)
    slots.begin_step([len(prompt) + num_fed for prompt, _, num_fed in rows] + [0] * num_fillers)
    slots.begin_states(len(rows), MIN_ROWS)
    fed = [tokens[num_fed] for _, tokens, num_fed in rows] + [0] * num_fillers
    hidden_RH = model.hidden(mx.array(fed)[:, None], slots.caches, None)[:, 0]
    slots.end_states(len(rows))
    return hidden_RH
