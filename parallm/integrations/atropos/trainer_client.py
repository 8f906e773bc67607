"""The trainer's side of an Atropos run: registers, notices when run-api has lost it, fetches batches oldest first.

Asked by `AtroposSource`. `TrajectoryApi` is run-api of atroposlib 0.4.0. It serves the newest batch first, and its step
counts the batches that it has formed for any trainer; neither shows outside of `TrainerClient`.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import httpx

from parallm.errors import ConfigError
from parallm.rollout.settings import AtroposSettings

UNKNOWN_SIZE = -1
"""The API's answer for sizes that it does not know."""
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


class ApiUnreachable(Exception):
    """The API did not answer."""


class ApiFailed(Exception):
    """The API answered with an error, or with something else than was asked for."""


class NotRegistered(Exception):
    """The API knows of no trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A batch in sequences and the longest sequence in tokens, as a trainer registers them and `/info` shows them."""

    batch_size: int
    max_token_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The body of `/register`."""

    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int
    wandb_group: str = ""
    wandb_project: str = ""

    @property
    def sizes(self) -> Sizes:
        return Sizes(batch_size=self.batch_size, max_token_len=self.max_token_len)


class TrajectoryApi:
    """Calls of the API (`run-api`). Every method raises ApiUnreachable or ApiFailed.

    Each call is one question on a connection of its own, since the API closes a connection after an error of its own.
    """

    def __init__(self, settings: AtroposSettings, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url = settings.url.rstrip("/")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            timeout=settings.timeout_seconds,
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
            transport=transport,
        )

    async def register(self, registration: Registration) -> None:
        """Register; it counts only while the API holds nothing, and `info` shows whether it did."""
        await self._ask("POST", "/register", asdict(registration))

    async def info(self) -> Sizes:
        answer = await self._ask("GET", "/info")
        return Sizes(
            batch_size=_number(answer, "batch_size", "/info"), max_token_len=_number(answer, "max_token_len", "/info")
        )

    async def status(self) -> tuple[int, int]:
        """Return the number of batches that were formed, served or not, and of groups in no batch yet."""
        answer = await self._ask("GET", "/status")
        return _number(answer, "current_step", "/status"), _number(answer, "queue_size", "/status")

    async def batch(self) -> Sequence[Any] | None:
        """Return the groups of the next batch, which the API then forgets; None if it cannot form one.

        The first question lets environments in. Raises NotRegistered as well.
        """
        answer = await self._ask("GET", "/batch")
        if answer.get("status") == "error":
            raise NotRegistered(str(answer.get("message")))
        groups = answer.get("batch")
        if groups is not None and not isinstance(groups, list):
            raise ApiFailed("/batch has answered without a list of groups")
        return groups

    async def reset(self) -> None:
        """Make the API forget everything: queue, batches, environments, trainer."""
        await self._ask("GET", "/reset_data")

    async def disconnect(self, env_id: int) -> None:
        """Remove an environment that is dead."""
        await self._ask("POST", "/disconnect-env", {"env_id": env_id})

    async def latest_size(self) -> int | None:
        """Sequences of the newest group; None without one."""
        tokens = (await self._ask("GET", "/latest_example")).get("tokens")
        return len(tokens) if isinstance(tokens, list) and tokens else None

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        try:
            response = await self._http.request(method, path, json=body)
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise ApiUnreachable(f"{self.url}{path}: {str(error) or type(error).__name__}") from error
        if response.status_code >= 400:
            raise ApiFailed(f"{self.url}{path} has answered {response.status_code}")
        if not response.headers.get("content-type", "").startswith("application/json"):
            return {}
        try:
            # a batch may have megabytes
            answer = await asyncio.to_thread(json.loads, response.content)
        except (ValueError, RecursionError) as error:
            raise ApiFailed(f"{self.url}{path} has answered no JSON") from error
        return answer if isinstance(answer, dict) else {}


def _number(answer: Mapping[str, Any], name: str, path: str) -> int:
    value = answer.get(name)
    if not isinstance(value, int):
        raise ApiFailed(f"{path} has answered without {name}: is this the API of Atropos?")
    return value


@dataclass(slots=True, kw_only=True)
class ApiFacts:
    """The API's state, as it was last seen. Changed by `TrainerClient` only; `registered_at` is a time of its clock."""

    state: ApiState = "unregistered"
    registered_at: float | None = None
    step: int = 0
    """Batches that it has formed, served or not."""
    num_queued: int = 0
    """Groups in no batch yet."""
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
        self._asked_sizes = self._asked_example = -math.inf
        self.facts = ApiFacts()

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
        if batch is None:
            await self._look_around()
            return
        self._take(batch)
        # batches that were formed together hold no environment back any more, and would be served newest first
        for _ in range(await self._look() - 1):
            more = await self._api.batch()
            if more is not None:
                self._take(more)

    def _take(self, batch: Sequence[Any]) -> None:
        self._fetched.append(batch)
        self.facts.state, self.facts.problem = "serving", ""
        self.facts.num_batches += 1

    async def _look_around(self) -> None:
        """Find out, where there is no batch, whether the API serves another trainer by now."""
        await self._look()
        if self._step is None:
            return
        if self._clock() - self._asked_sizes >= SECONDS_BETWEEN_SIZES:
            self._asked_sizes = self._clock()
            if not await self._is_registered():
                return
        self.facts.state, self.facts.problem = "waiting", ""
        if self.facts.num_queued and self._clock() - self._asked_example >= SECONDS_BETWEEN_EXAMPLES:
            self._asked_example = self._clock()
            self.facts.last_group_size = await self._api.latest_size()

    async def _is_registered(self, before: str = "") -> bool:
        """Whether the API holds this trainer's sizes; else it is lost, for a reason that begins with `before`."""
        sizes = await self._api.info()
        is_registered = sizes == self._registration().sizes
        if not is_registered:
            self._lose(f"{before}it holds {describe(sizes)}")
        return is_registered

    async def _look(self) -> int:
        """Return how many batches the API has formed since the last look; 0 if it has begun anew."""
        step, num_queued = await self._api.status()
        before = self._step or 0
        if step < before:
            self._lose(f"its step has gone back from {before} to {step}")
            return 0
        self._step = self.facts.step = step
        self.facts.num_queued = num_queued
        return step - before

    async def _after_error(self, error: ApiFailed) -> None:
        """Count a batch as lost, which is one with a number that JSON cannot hold, unless the API has begun anew."""
        if not await self._is_registered(f"{error}, and "):
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
            raise ApiFailed(f"{self._api.url} stays without a trainer after {MAX_RESETS} resets")
        step, _ = await self._api.status()
        self.facts.state, self.facts.problem = "waiting", ""
        self.facts.registered_at = self._asked_sizes = self._clock()
        return step

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
