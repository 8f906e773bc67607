"""`Client`: synchronous."""

from collections.abc import Mapping
from types import TracebackType
from typing import TypeVar

import httpx

from parallm.client import calls
from parallm.client.calls import Call, Reward
from parallm.reports import SplitReport, TrainingStatus, TrajectoryReport
from parallm.types import POLICY, AdapterCard

Result = TypeVar("Result")
Self = TypeVar("Self", bound="Client")


class Client:
    """Every method raises ApiError for what the server refuses, and httpx.HTTPError for what does not reach it."""

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout: float = 600.0, http: httpx.Client | None = None
    ) -> None:
        """`base_url` without `/v1`. `http` is a client of your own, whose headers and limits then count."""
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = http or httpx.Client(base_url=base_url, headers=headers, timeout=timeout)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def adapters(self) -> tuple[AdapterCard, ...]:
        """Every version in memory."""
        return self._send(calls.adapters())

    def load_adapter(self, name: str, path: str) -> AdapterCard:
        """Serve a folder below the server's `server.adapters_root` as the next version of `name`."""
        return self._send(calls.load_adapter(name, path))

    def upload_adapter(self, name: str, archive: bytes) -> AdapterCard:
        """Serve a zip archive of adapter_config.json and safetensors as the next version of `name`."""
        return self._send(calls.upload_adapter(name, archive))

    def update_adapter(self, name: str, weights: bytes) -> AdapterCard:
        """Serve the present version with these tensors (safetensors) in place of its own as the next one."""
        return self._send(calls.update_adapter(name, weights))

    def unload_adapter(self, model: str) -> None:
        """Forget `poet`, or one version `poet@3`. Requests that run finish first."""
        self._send(calls.unload_adapter(model))

    def promote(self, version: int, name: str = POLICY) -> None:
        """Let the bare name mean this version."""
        self._send(calls.promote(version, name))

    def roll_back(self, name: str = POLICY) -> int:
        """Let the bare name mean the version below; which one that is."""
        return self._send(calls.roll_back(name))

    def set_alias(self, alias: str, version: int, name: str = POLICY) -> None:
        """Let `name@alias` mean a version."""
        self._send(calls.set_alias(alias, version, name))

    def remove_alias(self, alias: str, name: str = POLICY) -> None:
        self._send(calls.remove_alias(alias, name))

    def training_status(self) -> TrainingStatus:
        return self._send(calls.training_status())

    def pause_training(self, policy: str | None = None) -> TrainingStatus:
        """Begin no further step."""
        return self._send(calls.steer_training("pause", policy))

    def resume_training(self, policy: str | None = None) -> TrainingStatus:
        return self._send(calls.steer_training("resume", policy))

    def train_step(self, policy: str | None = None) -> TrainingStatus:
        """Wait for one more step: a new one where training is paused, else the one at work."""
        return self._send(calls.steer_training("update", policy))

    def checkpoint(self, policy: str | None = None) -> dict[str, str]:
        """Save after the present step; the folder of each policy's checkpoint, on the server's disk."""
        return self._send(calls.checkpoint(policy))

    def reward(self, trajectory_id: str, value: Reward) -> float:
        """Set the reward of a completion that was asked for with `collect_trajectory`; the sum of its parts."""
        return self._send(calls.reward(trajectory_id, value))

    def trajectories(self) -> dict[str, TrajectoryReport]:
        """What became of these completions, by policy."""
        return self._send(calls.trajectories())

    def splits(self) -> dict[str, SplitReport]:
        """Each name that clients have asked for: its shares, if it is split, and what its versions have answered."""
        return self._send(calls.splits())

    def set_split(self, name: str, weights: Mapping[str, float]) -> SplitReport:
        """Let these models answer requests for `name`, by their weights."""
        return self._send(calls.set_split(name, weights))

    def remove_split(self, name: str) -> None:
        self._send(calls.remove_split(name))

    def cancel(self, request_id: str) -> int:
        """End the requests of this id, which answer with what they have; how many there were."""
        return self._send(calls.cancel(request_id))

    def _send(self, call: Call[Result]) -> Result:
        return call.result(self._http.request(call.method, call.path, **call.options()))
