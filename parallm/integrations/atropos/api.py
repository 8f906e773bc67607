"""The trajectory API of atroposlib 0.4.0 (`run-api`), as a trainer asks it. One question a call, nothing is repeated.

Each call has a connection of its own: after an error of its own the API closes the one that it came by.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from parallm.rollout.atropos_settings import AtroposSettings

UNKNOWN_ENVIRONMENT = 500
"""Status with which the API tells so."""
UNKNOWN_SIZE = -1
"""What the API answers for sizes that it does not know."""


class ApiUnreachable(Exception):
    """No answer."""


class ApiFailed(Exception):
    """An answer that is none; `status` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NotRegistered(Exception):
    """The API knows of no trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a trainer registers, and `/info` tells: a batch in sequences, the longest sequence in tokens."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiStatus:
    step: int
    """Batches formed, served or not."""
    num_queued: int
    """Groups that no batch was formed of yet."""


class TrajectoryApi:
    """Every method raises ApiUnreachable or ApiFailed."""

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
        """Counts only while the API holds nothing: `info` tells whether it did."""
        await self._ask("POST", "/register", asdict(registration))

    async def info(self) -> Sizes:
        found = await self._ask("GET", "/info")
        return Sizes(
            batch_size=_number(found, "batch_size", "/info"), max_token_len=_number(found, "max_token_len", "/info")
        )

    async def status(self) -> ApiStatus:
        found = await self._ask("GET", "/status")
        return ApiStatus(
            step=_number(found, "current_step", "/status"), num_queued=_number(found, "queue_size", "/status")
        )

    async def batch(self) -> Sequence[Any] | None:
        """The groups of the next batch, which the API then forgets; None if it cannot form one.

        The first question lets environments in. Raises NotRegistered, too.
        """
        found = await self._ask("GET", "/batch")
        if found.get("status") == "error":
            raise NotRegistered(str(found.get("message")))
        groups = found.get("batch")
        if groups is not None and not isinstance(groups, list):
            raise ApiFailed("/batch has answered without a list of groups", 200)
        return groups

    async def reset(self) -> None:
        """Let the API forget everything: queue, batches, environments, trainer."""
        await self._ask("GET", "/reset_data")

    async def disconnect(self, env_id: int) -> None:
        """Let an environment that is dead count no more."""
        await self._ask("POST", "/disconnect-env", {"env_id": env_id})

    async def status_env(self, env_id: int) -> Mapping[str, Any] | None:
        """What an environment is told of itself; None if the API knows none of that id."""
        try:
            return await self._ask("GET", "/status-env", {"env_id": env_id})
        except ApiFailed as error:
            if error.status == UNKNOWN_ENVIRONMENT:
                return None
            raise

    async def latest_size(self) -> int | None:
        """Sequences of the group that came last; None if none has."""
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
            raise ApiFailed(f"{self.url}{path} has answered {response.status_code}", response.status_code)
        if not response.headers.get("content-type", "").startswith("application/json"):
            return {}
        try:
            # a batch may have megabytes
            found = await asyncio.to_thread(json.loads, response.content)
        except (ValueError, RecursionError) as error:
            raise ApiFailed(f"{self.url}{path} has answered no JSON", response.status_code) from error
        return found if isinstance(found, dict) else {}


def _number(found: Mapping[str, Any], name: str, path: str) -> int:
    value = found.get(name)
    if not isinstance(value, int):
        raise ApiFailed(f"{path} has answered without {name}: is this the API of Atropos?", 200)
    return value
