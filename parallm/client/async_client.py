"""`AsyncClient`: the same as `Client`, to be awaited."""

from collections.abc import Mapping
from types import TracebackType
from typing import TypeVar

import httpx

from parallm.client import calls
from parallm.client.calls import Call, Reward
from parallm.reports import SplitReport, TrainingStatus, TrajectoryReport
from parallm.types import POLICY, AdapterCard

Result = TypeVar("Result")
Self = TypeVar("Self", bound="AsyncClient")


class AsyncClient:
    """Every method raises ApiError for what the server refuses, and httpx.HTTPError for what does not reach it."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        """`base_url` without `/v1`. `http` is a client of your own, whose headers and limits then count."""
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = http or httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout)

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def adapters(self) -> tuple[AdapterCard, ...]:
        return await self._send(calls.adapters())

    async def load_adapter(self, name: str, path: str) -> AdapterCard:
        return await self._send(calls.load_adapter(name, path))

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

    async def cancel(self, request_id: str) -> int:
        return await self._send(calls.cancel(request_id))

    async def _send(self, call: Call[Result]) -> Result:
        return call.result(await self._http.request(call.method, call.path, **call.options()))
