"""The trainer's side of an Atropos run: registers, notices when the API has lost it, fetches batches oldest first.

The API serves what it has formed newest first, and its count of steps is of batches formed, for whomever. Both stay
here: a run's own steps are counted by its trainer.
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
"""Of an API to which environments post at the wrong moments, before it is given some time."""
SECONDS_BETWEEN_SIZES = 5.0
"""Whose sizes the API holds is looked at, while there is no batch."""
SECONDS_BETWEEN_EXAMPLES = 10.0
"""A question for the latest group brings the whole group."""

ApiState = Literal["unreachable", "unregistered", "poisoned", "waiting", "serving"]
"""`poisoned`: an environment has posted before a trainer was registered, so that no trainer can be; `serving`: the last
question brought a batch, `waiting`: there was none."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class ApiFacts:
    """What is known of the API. Changed by `TrainerClient` only; times are those of its clock."""

    state: ApiState = "unregistered"
    registered_at: float | None = None
    status: ApiStatus | None = None
    status_at: float | None = None
    queued_since: float | None = None
    """Since when groups wait without a batch."""
    last_batch_at: float | None = None
    last_group_size: int | None = None
    num_batches: int = 0
    num_lost: int = 0
    """Registrations that the API has forgotten."""
    num_failed_batches: int = 0
    """Batches that the API has lost in an error of its own."""
    problem: str = ""
    """What went wrong last."""


class TrainerClient:
    """For one task. `registration` is asked for anew at each registration, since steps go on."""

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
        self._fetched: list[Sequence[Any]] = []  # formed together, in the order of their arrival: newest first
        self._step: int | None = None  # of the API; None: not registered
        self._step_before = 0  # when it was asked before the last time
        self._asked_sizes = self._asked_example = -math.inf
        self.facts = ApiFacts()
        self.registered = asyncio.Event()
        """Environments may begin: a trainer is registered and has asked for its first batch."""

    async def next_batch(self) -> Sequence[Any] | None:
        """The groups of the oldest batch that is formed; None if there is none now, or no API.

        Registers first where that is to be done. Raises ConfigError for an API that serves a trainer of other sizes.
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
        # What was formed with it holds no environment back any more, and would be served newest first
        for _ in range(await self._num_formed() - 1):
            more = await self._api.batch()
            if more is not None:
                self._take(more)

    def _take(self, batch: Sequence[Any]) -> None:
        self._fetched.append(batch)
        self.facts.state, self.facts.problem = "serving", ""
        self.facts.num_batches += 1
        self.facts.last_batch_at = self._clock()
        self.facts.queued_since = None

    async def _num_formed(self) -> int:
        """Batches that the API has formed since it was asked last."""
        status = await self._look()
        return 0 if status is None or self._step is None else status.step - self._step_before

    async def _look_around(self) -> None:
        """There is no batch: is that because the API serves somebody else?"""
        if await self._look() is None:
            return
        if self._clock() - self._asked_sizes >= SECONDS_BETWEEN_SIZES:
            self._asked_sizes = self._clock()
            found = await self._api.info()
            if found != self._registration().sizes:
                self._lose(f"it holds {_told(found)}")
                return
        self.facts.state, self.facts.problem = "waiting", ""
        if self.facts.queued_since is None:
            return
        if self._clock() - self._asked_example >= SECONDS_BETWEEN_EXAMPLES:
            self._asked_example = self._clock()
            self.facts.last_group_size = await self._api.latest_size()

    async def _look(self) -> ApiStatus | None:
        """The API's status; None if it has begun anew and knows no trainer."""
        status, now = await self._api.status(), self._clock()
        self._step_before = self._step or 0
        if status.step < self._step_before:
            self._lose(f"its step has gone back from {self._step_before} to {status.step}")
            return None
        self._step = status.step
        self.facts.status, self.facts.status_at = status, now
        if status.num_queued == 0:
            self.facts.queued_since = None
        elif self.facts.queued_since is None:
            self.facts.queued_since = now
        return status

    async def _after_error(self, error: ApiFailed) -> None:
        """A batch with a number that JSON cannot hold is lost where it is served; else the API has begun anew."""
        found = await self._api.info()
        if found != self._registration().sizes:
            self._lose(f"{error}, and it holds {_told(found)}")
            return
        await self._look()
        self.facts.num_failed_batches += 1
        self._note(f"{error}: a batch is lost; an environment may have posted NaN or infinity")
        logger.warning("%s", self.facts.problem)

    async def _register(self) -> int:
        """Returns the API's step."""
        registration = self._registration()
        found = await self._api.info()
        if found == registration.sizes:
            logger.info("%s holds a run of these sizes: training goes on with what it has", self._api.url)
        elif found.batch_size != UNKNOWN_SIZE:
            await self._empty(found, registration.sizes)
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
        self.facts.registered_at, self.facts.queued_since = self._clock(), None
        self._asked_sizes = self._clock()
        return status.step

    async def _empty(self, found: Sizes, own: Sizes) -> None:
        if not self._may_reset:
            raise ConfigError(
                f"rollout.atropos.url={self._api.url}: the API serves a trainer with {_told(found)}, this run has "
                f"{_told(own)}; take those (rollout.problems_per_step x rollout.group_size, "
                "rollout.atropos.max_token_len), start the API anew, or let it be emptied with "
                "rollout.atropos.reset=true"
            )
        logger.warning("%s holds %s of another trainer: emptied (rollout.atropos.reset)", self._api.url, _told(found))
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


def _told(sizes: Sizes) -> str:
    if sizes.batch_size == UNKNOWN_SIZE:
        return "no trainer"
    return f"batch_size={sizes.batch_size} and max_token_len={sizes.max_token_len}"
