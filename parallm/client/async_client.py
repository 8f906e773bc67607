"""`AsyncClient`: the same as `Client`, to be awaited."""

import ssl
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx

from parallm.client import calls
from parallm.client.calls import Call, Generated, Prompt, Reward
from parallm.client.connection import connection
from parallm.reports import SplitReport, TrainingStatus, TrajectoryReport
from parallm.types import POLICY, AdapterCard, GivenUpdate

Result = TypeVar("Result")
Self = TypeVar("Self", bound="AsyncClient")


class AsyncClient:
    """Every method raises ApiError for what the server refuses, and httpx.HTTPError for what does not reach it."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = None,
        verify: ssl.SSLContext | bool | None = None,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        """`base_url` without `/v1`. `verify` is a context of ssl, or False to trust any certificate.

        `http` is an HTTP client of your own, with its timeout, certificates and proxies; `api_key` is sent beside its
        headers. Raises ValueError for arguments that contradict it.
        """
        self._connection = connection(base_url, api_key=api_key, timeout=timeout, verify=verify, http=http)
        self._http = http or httpx.AsyncClient(**self._connection.options)

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def generate(
        self,
        prompt: Prompt,
        *,
        policy_version: int | None = None,
        step_id: int | str | None = None,
        **fields: Any,
    ) -> Generated:
        return await self._send(calls.generate(prompt, policy_version, step_id, fields))

    async def generate_all(
        self,
        prompts: Sequence[Prompt],
        *,
        policy_version: int | None = None,
        step_id: int | str | None = None,
        **fields: Any,
    ) -> list[Generated]:
        return await self._send(calls.generate_all(prompts, policy_version, step_id, fields))

    async def adapters(self) -> tuple[AdapterCard, ...]:
        return await self._send(calls.adapters())

    async def load_adapter(self, path: str, *, name: str = POLICY) -> AdapterCard:
        return await self._send(calls.load_adapter(path, name))

    async def upload_adapter(self, name: str, archive: bytes) -> AdapterCard:
        return await self._send(calls.upload_adapter(name, archive))

    async def update_adapter(self, name: str, weights: bytes) -> AdapterCard:
        return await self._send(calls.update_adapter(name, weights))

    async def unload_adapter(self, model: str) -> None:
        await self._send(calls.unload_adapter(model))

    async def promote(self, version: int, name: str = POLICY) -> None:
        await self._send(calls.promote(version, name))

    async def roll_back(self, name: str = POLICY) -> int:
        return await self._send(calls.roll_back(name))

    async def set_alias(self, alias: str, version: int, name: str = POLICY) -> None:
        await self._send(calls.set_alias(alias, version, name))

    async def remove_alias(self, alias: str, name: str = POLICY) -> None:
        await self._send(calls.remove_alias(alias, name))

    async def training_status(self) -> TrainingStatus:
        return await self._send(calls.training_status())

    async def pause_training(self, policy: str | None = None) -> TrainingStatus:
        return await self._send(calls.steer_training("pause", policy))

    async def resume_training(self, policy: str | None = None) -> TrainingStatus:
        return await self._send(calls.steer_training("resume", policy))

    async def train_on(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        *,
        policy: str | None = None,
        update_inference: bool | None = None,
        checkpoint_name: str | None = None,
    ) -> GivenUpdate:
        return await self._send(calls.train_on(trajectories, policy, update_inference, checkpoint_name))

    async def train_step(self, policy: str | None = None) -> TrainingStatus:
        return await self._send(calls.steer_training("update", policy))

    async def checkpoint(self, policy: str | None = None) -> dict[str, str]:
        return await self._send(calls.checkpoint(policy))

    async def reward(self, trajectory_id: str, value: Reward) -> float:
        return await self._send(calls.reward(trajectory_id, value))

    async def trajectories(self) -> dict[str, TrajectoryReport]:
        return await self._send(calls.trajectories())

    async def splits(self) -> dict[str, SplitReport]:
        return await self._send(calls.splits())

    async def set_split(self, name: str, weights: Mapping[str, float]) -> SplitReport:
        return await self._send(calls.set_split(name, weights))

    async def remove_split(self, name: str) -> None:
        await self._send(calls.remove_split(name))

    async def score(self, texts: Sequence[str], *, model: str | None = None) -> list[float]:
        return await self._send(calls.score(texts, model))

    async def score_completions(
        self, prompt: str | Sequence[Mapping[str, str]], completions: Sequence[str], *, model: str | None = None
    ) -> list[float]:
        return await self._send(calls.score_completions(prompt, completions, model))

    async def shares(self) -> dict[str, float]:
        return await self._send(calls.shares())

    async def set_shares(
        self, *, serving_share: float | None = None, engine_share: float | None = None
    ) -> dict[str, float]:
        return await self._send(calls.set_shares(serving_share, engine_share))

    async def cancel(self, request_id: str) -> int:
        return await self._send(calls.cancel(request_id))

    async def _send(self, call: Call[Result]) -> Result:
        url = self._connection.base_url + call.path
        return call.result(
            await self._http.request(call.method, url, headers=self._connection.headers, **call.options())
        )
