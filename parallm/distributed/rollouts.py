"""Completions of a step that several workers encode, and rank 0 writes to one file.

Each encodes those that it has computed the learner's numbers of, and its share of those that were not trained on. What
does not come, rank 0 encodes without the learner's numbers.
"""

import time
from collections import defaultdict
from collections.abc import Callable

from parallm.distributed.exchange import Gathering
from parallm.distributed.wire import pack_rows, unpack_rows
from parallm.metrics.rollout_format import Cut, EncodedRow, Place, StepRollouts, encode_rows, join_rows
from parallm.metrics.rollout_writer import RolloutWriter, Throttle

POST_SECONDS = 30.0
"""Time in which the completions of other workers must come."""


class RolloutPosts(RolloutWriter):
    """The writer of each rank but 0: it sends what it has encoded."""

    def __init__(self, exchange: Gathering, cut: Cut, is_decoding: Callable[[], bool]) -> None:
        super().__init__(is_decoding)
        self._exchange = exchange
        self._cut = cut

    def _write(self, rollouts: StepRollouts, throttle: Throttle) -> None:
        post_own(self._exchange, rollouts, self._cut, throttle)

    def _drop(self, step: int) -> None:
        self._exchange.post(pack_rows(step, {}))


class Joining:
    """What encodes the files of rank 0: it joins the rows that it gets."""

    def __init__(self, exchange: Gathering, cut: Cut) -> None:
        self._exchange = exchange
        self._cut = cut
        self._posts: defaultdict[int, list[dict[Place, EncodedRow]]] = defaultdict(list)  # by step, one of each rank

    def encode(self, rollouts: StepRollouts, throttle: Callable[[], object]) -> bytes:
        """Return the content of a step's file. Waits for the other workers."""
        post_own(self._exchange, rollouts, self._cut, throttle)
        rows: dict[Place, EncodedRow] = {}
        for part in self._take(rollouts.step):
            rows |= part
        missing = [place for place in rollouts.places if place not in rows]
        rows |= encode_rows(rollouts, missing, self._cut, throttle)
        return join_rows(rollouts, rows, throttle)

    def _take(self, step: int) -> list[dict[Place, EncodedRow]]:
        """What the workers have posted of a step; forgets that of earlier ones, which this rank has dropped."""
        deadline = time.monotonic() + POST_SECONDS
        while len(self._posts[step]) < self._exchange.size:
            post = self._exchange.take_post(max(0.0, deadline - time.monotonic()))
            if post is None:
                break
            of_step, rows = unpack_rows(post[1])
            self._posts[of_step].append(rows)
        parts = self._posts[step]
        for other in [other for other in self._posts if other <= step]:
            del self._posts[other]
        return parts


def post_own(exchange: Gathering, rollouts: StepRollouts, cut: Cut, throttle: Callable[[], object]) -> None:
    """Encode this rank's completions and send them to rank 0."""
    own = [
        place
        for place in rollouts.places
        if place in rollouts.learned or (place not in rollouts.trained and place[0] % exchange.size == exchange.rank)
    ]
    exchange.post(pack_rows(rollouts.step, encode_rows(rollouts, own, cut, throttle)))
