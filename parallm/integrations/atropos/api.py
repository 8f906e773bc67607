"""The trajectory API of atroposlib 0.4.0 (`run-api`), as a trainer asks it. Called by `TrainerClient` and `Launcher`.

Each call is one question on a connection of its own, since the API closes a connection after an error of its own.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from parallm.rollout.settings import AtroposSettings

UNKNOWN_SIZE = -1
"""The API's answer for sizes that it does not know."""


class ApiUnreachable(Exception):
    """The API did not answer."""


class ApiFailed(Exception):
    """The API answered with an error, or with something else than was asked for; `status` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiStatus:
    step: int
    """Batches formed, served or not."""
    num_queued: int
    """Groups in no batch yet."""


class TrajectoryApi:
    """Calls of the API. Every method raises ApiUnreachable or ApiFailed."""

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

    async def status(self) -> ApiStatus:
        answer = await self._ask("GET", "/status")
        return ApiStatus(
            step=_number(answer, "current_step", "/status"), num_queued=_number(answer, "queue_size", "/status")
        )

    async def batch(self) -> Sequence[Any] | None:
        """Return the groups of the next batch, which the API then forgets; None if it cannot form one.

        The first question lets environments in. Raises NotRegistered as well.
        """
        answer = await self._ask("GET", "/batch")
        if answer.get("status") == "error":
            raise NotRegistered(str(answer.get("message")))
        groups = answer.get("batch")
        if groups is not None and not isinstance(groups, list):
            raise ApiFailed("/batch has answered without a list of groups", 200)
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
            raise ApiFailed(f"{self.url}{path} has answered {response.status_code}", response.status_code)
        if not response.headers.get("content-type", "").startswith("application/json"):
            return {}
        try:
            # a batch may have megabytes
            answer = await asyncio.to_thread(json.loads, response.content)
        except (ValueError, RecursionError) as error:
            raise ApiFailed(f"{self.url}{path} has answered no JSON", response.status_code) from error
        return answer if isinstance(answer, dict) else {}


def _number(answer: Mapping[str, Any], name: str, path: str) -> int:
    value = answer.get(name)
    if not isinstance(value, int):
        raise ApiFailed(f"{path} has answered without {name}: is this the API of Atropos?", 200)
    return value
