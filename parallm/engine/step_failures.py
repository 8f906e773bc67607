"""Rows for which the model computes NaN: finite weights whose products are not, as of an adapter that has diverged.

Their numbers touch no other row: products and attention keep rows apart, and their slots are cleared when they leave
(`SlotCache.clear`). A client's request fails with the name of the adapter. A rollout ends where it is, with the NaN
among its log-probabilities, by which the learner knows what to leave out.
"""

import logging
import math
import re
from collections.abc import Iterable
from collections.abc import Sequence as Ordered

from parallm.engine.sequence import Sequence
from parallm.errors import NotFinite
from parallm.model.adapters.names import versioned
from parallm.types import PromptLogprob

logger = logging.getLogger(__name__)


class BrokenRows:
    """Tells what becomes of them."""

    def __init__(self) -> None:
        self._warned: set[str] = set()  # of each model once

    def failures(self, rows: Iterable[Sequence]) -> dict[str, NotFinite]:
        """The errors of clients' requests that have a broken row, by their ids. Warns of broken rollouts."""
        errors = [(row.request, _error(row)) for row in rows if row.is_broken]
        for message in {str(error) for request, error in errors if request.traffic == "rollout"} - self._warned:
            self._warned.add(message)
            logger.warning("a rollout ends where it is: %s", message)
        return {request.request_id: error for request, error in errors if request.traffic == "serving"}


def has_nan(scores: Ordered[PromptLogprob | None]) -> bool:
    return any(score is not None and math.isnan(score.logprob) for score in scores)


def _error(row: Sequence) -> NotFinite:
    if row.adapter is None:
        return NotFinite("the base computes numbers that are not finite for this prompt; try model.dtype=float32")
    model = versioned(row.adapter.name, row.adapter.version)
    return NotFinite(
        f"with {model} the model computes numbers that are not finite, so no token can be sampled; ask another model, "
        "or load other weights under this name"
    )


_SIGNS = re.compile(r"out of memory|unable to allocate|insufficient memory|attempting to allocate", re.IGNORECASE)
"""CUDA's, MLX's on a CPU, Metal's command buffers, MLX's on Metal."""


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_SIGNS.search(str(error))))
