"""Failures of a step that are not the code's: NaN for some sequences, and a device without memory.

NaN comes from finite weights whose products are not finite, as of an adapter that has diverged. It touches no other
sequence: products and attention keep rows apart, and a slot is cleared when its sequence leaves (`SlotCache.clear`). A
client's request fails with the name of the adapter. A rollout ends where it is, with the NaN among its log-probs, which
the learner leaves out.
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

OUT_OF_MEMORY = re.compile(
    r"out of memory|unable to allocate|insufficient memory|attempting to allocate", re.IGNORECASE
)
"""Messages of CUDA, MLX on a CPU, Metal's command buffers, and MLX on Metal."""

logger = logging.getLogger(__name__)


class BrokenSequences:
    """Warns of each model once."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def failures(self, sequences: Iterable[Sequence]) -> dict[str, NotFinite]:
        """Errors of clients' requests with a broken sequence, by request id; warns of broken rollouts."""
        errors = [(sequence.request, _error(sequence)) for sequence in sequences if sequence.is_broken]
        for message in {str(error) for request, error in errors if request.traffic == "rollout"} - self._warned:
            self._warned.add(message)
            logger.warning("a rollout ends where it is: %s", message)
        return {request.request_id: error for request, error in errors if request.traffic == "serving"}


def has_nan(logprobs: Ordered[PromptLogprob | None]) -> bool:
    return any(one is not None and math.isnan(one.logprob) for one in logprobs)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and bool(OUT_OF_MEMORY.search(str(error)))
    )


def _error(sequence: Sequence) -> NotFinite:
    if sequence.adapter is None:
        return NotFinite("the base computes numbers that are not finite for this prompt; try model.dtype=float32")
    model = versioned(sequence.adapter.name, sequence.adapter.version)
    return NotFinite(
        f"with {model} the model computes numbers that are not finite, so no token can be sampled; ask another model, "
        "or load other weights under this name"
    )
