"""The trainer's side of an Atropos run: registers, notices when run-api has lost it, fetches batches oldest first.

Asked by `AtroposSource`. run-api serves the newest batch first, and its step counts the batches that it has formed for
any trainer; neither shows outside of this module.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from parallm.errors import ConfigError
from parallm.integrations.atropos.api import (
    UNKNOWN_SIZE,
    ApiFailed,
    ApiStatus,
    ApiUnreachable,
    NotRegistered,
    Registration,
    Sizes,
    TrajectoryApi,
)

MAX_RESETS = 20
"""Resets in a row of an API to which environments post at the wrong moments."""
SECONDS_BETWEEN_SIZES = 5.0
"""Seconds between two looks at the sizes that the API holds, while there is no batch."""
SECONDS_BETWEEN_EXAMPLES = 10.0
"""Seconds between two looks at the size of the latest group, which brings the whole group."""

ApiState = Literal["unreachable", "unregistered", "poisoned", "waiting", "serving"]
"""`poisoned`: an environment has posted before a trainer was registered, so no trainer can be; `serving`: the last
question brought a batch; `waiting`: it brought none."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class ApiFacts:
    """The API's state, as it was last seen. Changed by `TrainerClient` only; `registered_at` is a time of its clock."""

    state: ApiState = "unregistered"
    registered_at: float | None = None
    status: ApiStatus | None = None
    last_group_size: int | None = None
    """Sequences of the newest group in the queue."""
    num_batches: int = 0
    num_lost: int = 0
    """Registrations that the API has forgotten."""
    num_failed_batches: int = 0
    """Batches that the API has lost in an error of its own."""
    problem: str = ""
    """The newest failure."""


class TrainerClient:
    """Used by one task. `registration` is called at each registration, since steps go on."""

    def __init__(
        self,
        api: TrajectoryApi,
        registration: Callable[[], Registration],
        *,
        may_reset: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._registration = registration
        self._may_reset = may_reset
        self._clock = clock
        self._fetched: list[Sequence[Any]] = []  # batches that were formed together, the newest first
        self._step: int | None = None  # the API's step; None: not registered
        self._step_before = 0  # the API's step one look earlier
        self._asked_sizes = self._asked_example = -math.inf
        self.facts = ApiFacts()
        self.registered = asyncio.Event()
        """Set when environments may begin: a trainer is registered and has asked for its first batch."""

    async def next_batch(self) -> Sequence[Any] | None:
        """Return the groups of the oldest batch that is formed; None if there is none now, or no API.

        Registers first where it is not registered. Raises ConfigError for an API that serves a trainer of other sizes.
        """
        if not self._fetched:
            try:
                await self._ask()
            except ApiUnreachable as error:
                self._note(str(error), "unreachable")
            except NotRegistered as error:
                self._lose(str(error))
            except ApiFailed as error:
                self._note(str(error))
        return self._fetched.pop() if self._fetched else None

    async def _ask(self) -> None:
        if self._step is None:
            self._step = await self._register()
        try:
            batch = await self._api.batch()
        except ApiFailed as error:
            await self._after_error(error)
            return
        self.registered.set()
        if batch is None:
            await self._look_around()
            return
        self._take(batch)
        # batches that were formed together hold no environment back any more, and would be served newest first
        for _ in range(await self._num_formed() - 1):
            more = await self._api.batch()
            if more is not None:
                self._take(more)

    def _take(self, batch: Sequence[Any]) -> None:
        self._fetched.append(batch)
        self.facts.state, self.facts.problem = "serving", ""
        self.facts.num_batches += 1

    async def _num_formed(self) -> int:
        """Batches that the API has formed since the last look."""
        status = await self._look()
        return 0 if status is None or self._step is None else status.step - self._step_before

    async def _look_around(self) -> None:
        """Find out, where there is no batch, whether the API serves another trainer by now."""
        status = await self._look()
        if status is None:
            return
        if self._clock() - self._asked_sizes >= SECONDS_BETWEEN_SIZES:
            self._asked_sizes = self._clock()
            sizes = await self._api.info()
            if sizes != self._registration().sizes:
                self._lose(f"it holds {describe(sizes)}")
                return
        self.facts.state, self.facts.problem = "waiting", ""
        if status.num_queued and self._clock() - self._asked_example >= SECONDS_BETWEEN_EXAMPLES:
            self._asked_example = self._clock()
            self.facts.last_group_size = await self._api.latest_size()

    async def _look(self) -> ApiStatus | None:
        """Return the API's status; None if it has begun anew and knows no trainer."""
        status = await self._api.status()
        self._step_before = self._step or 0
        if status.step < self._step_before:
            self._lose(f"its step has gone back from {self._step_before} to {status.step}")
            return None
        self._step = status.step
        self.facts.status = status
        return status

    async def _after_error(self, error: ApiFailed) -> None:
        """Count a batch as lost, which is one with a number that JSON cannot hold, unless the API has begun anew."""
        sizes = await self._api.info()
        if sizes != self._registration().sizes:
            self._lose(f"{error}, and it holds {describe(sizes)}")
            return
        await self._look()
        self.facts.num_failed_batches += 1
        self._note(f"{error}: a batch is lost; an environment may have posted NaN or infinity")
        logger.warning("%s", self.facts.problem)

    async def _register(self) -> int:
        """Register and return the API's step."""
        registration = self._registration()
        sizes = await self._api.info()
        if sizes == registration.sizes:
            logger.info("%s holds a run of these sizes: training goes on with what it has", self._api.url)
        elif sizes.batch_size != UNKNOWN_SIZE:
            await self._empty(sizes, registration.sizes)
        for _ in range(MAX_RESETS):
            await self._api.register(registration)
            if await self._api.info() == registration.sizes:
                break
            if self.facts.state != "poisoned":
                logger.warning("%s: an environment has posted before any trainer: resetting the API", self._api.url)
            self.facts.state = "poisoned"
            await self._api.reset()
        else:
            raise ApiFailed(f"{self._api.url} stays without a trainer after {MAX_RESETS} resets", 200)
        status = await self._api.status()
        self.facts.state, self.facts.problem = "waiting", ""
        self.facts.registered_at = self._clock()
        self._asked_sizes = self._clock()
        return status.step

    async def _empty(self, sizes: Sizes, own: Sizes) -> None:
        if not self._may_reset:
            raise ConfigError(
                f"rollout.atropos.url={self._api.url}: the API serves a trainer with {describe(sizes)}, this run has "
                f"{describe(own)}; take those (rollout.problems_per_step x rollout.group_size, "
                "rollout.atropos.max_token_len), start the API anew, or let it be emptied with "
                "rollout.atropos.reset=true"
            )
        logger.warning(
            "%s holds %s of another trainer: emptied (rollout.atropos.reset)", self._api.url, describe(sizes)
        )
        await self._api.reset()

    def _lose(self, why: str) -> None:
        logger.warning("%s has lost this trainer (%s); registering again", self._api.url, why)
        self._step = None
        self.registered.clear()
        self.facts.num_lost += 1
        self._note(why, "unregistered")

    def _note(self, problem: str, state: ApiState | None = None) -> None:
        if state == "unreachable" and self.facts.state != state:
            logger.warning("%s; asking again until it answers", problem)
        self.facts.problem = problem
        self.facts.state = state or self.facts.state


def describe(sizes: Sizes) -> str:
    if sizes.batch_size == UNKNOWN_SIZE:
        return "no trainer"
    return f"batch_size={sizes.batch_size} and max_token_len={sizes.max_token_len}"
