"""Completions of a step that several workers encode, and rank 0 writes to one file.

A worker encodes the completions of its own rounds, and an equal share of those that were not trained on. Rank 0 encodes
what does not arrive, without the learner's numbers.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable

from parallm.distributed.exchange import Gathering
from parallm.distributed.wire import pack_rows, unpack_rows
from parallm.metrics.rollout_format import Cut, EncodedRows, StepRollouts, encode_rows, join_rows
from parallm.metrics.rollout_writer import RolloutWriter, Throttle

POST_SECONDS = 30.0
"""Time in which the completions of other workers must come."""

logger = logging.getLogger(__name__)


class RolloutPosts(RolloutWriter):
    """The writer of each rank but 0: it sends what it has encoded."""

    def __init__(self, exchange: Gathering, cut: Cut, is_decoding: Callable[[], bool]) -> None:
        super().__init__(is_decoding)
        self._exchange = exchange
        self._cut = cut

    def _write(self, rollouts: StepRollouts, throttle: Throttle) -> None:
        rows: EncodedRows | None = None
        try:
            rows = encode_own(self._exchange, rollouts, self._cut, throttle)
        finally:
            self._exchange.post(pack_rows(rollouts.step, rows))

    def _drop(self, step: int) -> None:
        self._exchange.post(pack_rows(step, None))


class RolloutJoiner:
    """Encodes the files of rank 0, from its own rows and those that other ranks post."""

    def __init__(self, exchange: Gathering, cut: Cut) -> None:
        self._exchange = exchange
        self._cut = cut
        self._posts: defaultdict[int, dict[int, EncodedRows | None]] = defaultdict(dict)  # by step, then by rank
        self._awaited = set(range(1, exchange.size))  # ranks that have not ended
        self._has_warned = False

    def encode(self, rollouts: StepRollouts, throttle: Callable[[], object]) -> bytes:
        """Return the content of a step's file. Waits for the other workers."""
        self._forget(rollouts.step)
        rows = encode_own(self._exchange, rollouts, self._cut, throttle)
        posts = self._take(rollouts.step)
        for part in posts.values():
            rows |= part or {}
        missing = [index for index in rollouts.indices if index not in rows]
        if lost := [rank for rank in range(1, self._exchange.size) if posts.get(rank) is None]:
            self._warn_once(rollouts.step, lost, len(missing))
        rows |= encode_rows(rollouts, missing, self._cut, throttle)
        return join_rows(rollouts, rows, throttle)

    def _take(self, step: int) -> dict[int, EncodedRows | None]:
        """Return the rows that other ranks post of a step, by rank. None: the rank could not encode them; ranks whose
        rows do not come in time are missing."""
        deadline = time.monotonic() + POST_SECONDS
        while self._awaited - self._posts[step].keys() and (seconds := deadline - time.monotonic()) > 0:
            self._receive(seconds)
        return self._posts.pop(step)

    def _forget(self, step: int) -> None:
        """Forget posts of earlier steps, which have come too late, or which this rank has dropped."""
        while self._receive(0.0):
            pass
        for earlier in [other for other in self._posts if other < step]:
            del self._posts[earlier]

    def _receive(self, seconds: float) -> bool:
        """Keep the next post, if one comes in this time."""
        post = self._exchange.take_post(seconds)
        if post is None:
            return False
        rank, content = post
        if content is None:
            self._awaited.discard(rank)
        else:
            step, rows = unpack_rows(content)
            self._posts[step][rank] = rows
        return True

    def _warn_once(self, step: int, ranks: list[int], count: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "step %d: %d completions of rank %s did not come in time or could not be encoded; they are written "
                "without the learner's numbers, and so are those of later steps, without a further warning",
                step,
                count,
                ", ".join(map(str, ranks)),
            )


def encode_own(exchange: Gathering, rollouts: StepRollouts, cut: Cut, throttle: Callable[[], object]) -> EncodedRows:
    """Encode this rank's completions."""
    own = [
        (group, index)
        for group, index in rollouts.indices
        if (group, index) in rollouts.learned
        or ((group, index) not in rollouts.trained and group % exchange.size == exchange.rank)
    ]
    return encode_rows(rollouts, own, cut, throttle)
