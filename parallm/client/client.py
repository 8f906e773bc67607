"""`Client`: synchronous."""

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
Self = TypeVar("Self", bound="Client")


class Client:
    """Every method raises ApiError for what the server refuses, and httpx.HTTPError for what does not reach it."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = None,
        verify: ssl.SSLContext | bool | None = None,
        http: httpx.Client | None = None,
    ) -> None:
        """`base_url` without `/v1`. `verify` is a context of ssl, or False to trust any certificate.

        `http` is an HTTP client of your own, with its timeout, certificates and proxies; `api_key` is sent beside its
        headers. Raises ValueError for arguments that contradict it.
        """
        self._connection = connection(base_url, api_key=api_key, timeout=timeout, verify=verify, http=http)
        self._http = http or httpx.Client(**self._connection.options)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        policy_version: int | None = None,
        step_id: int | str | None = None,
        **fields: Any,
    ) -> Generated:
        """Sample one completion, with its tokens and log-probs.

        `policy_version` is the version that you believe to be served; the answer repeats it beside the version that
        sampled.
        `fields` are those of `/v1/completions`: `max_tokens`, `temperature` and others.
        """
        return self._send(calls.generate(prompt, policy_version, step_id, fields))

    def generate_all(
        self,
        prompts: Sequence[Prompt],
        *,
        policy_version: int | None = None,
        step_id: int | str | None = None,
        **fields: Any,
    ) -> list[Generated]:
        """Sample completions of several prompts in one request; with `n`, prompt by prompt."""
        return self._send(calls.generate_all(prompts, policy_version, step_id, fields))

    def adapters(self) -> tuple[AdapterCard, ...]:
        """Return every version in memory."""
        return self._send(calls.adapters())

    def load_adapter(self, path: str, *, name: str = POLICY) -> AdapterCard:
        """Serve a folder below the server's `server.adapters_root` as the next version of `name`.

        The policy moves to it in a process that does not train it.
        """
        return self._send(calls.load_adapter(path, name))

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
        """Let the bare name mean the version below. Returns that version."""
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

    def train_on(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        *,
        policy: str | None = None,
        update_inference: bool | None = None,
        checkpoint_name: str | None = None,
    ) -> GivenUpdate:
        """Make one update on trajectories, which `Generated.rewarded` returns, after the present step.

        `update_inference` says whether clients get the new version; `checkpoint_name` saves it under that name.
        """
        return self._send(calls.train_on(trajectories, policy, update_inference, checkpoint_name))

    def train_step(self, policy: str | None = None) -> TrainingStatus:
        """Wait for one more step: a new one where training is paused, else the one at work."""
        return self._send(calls.steer_training("update", policy))

    def checkpoint(self, policy: str | None = None) -> dict[str, str]:
        """Save after the present step. Returns the folder of each policy's checkpoint, on the server's disk."""
        return self._send(calls.checkpoint(policy))

    def reward(self, trajectory_id: str, value: Reward) -> float:
        """Set the reward of a completion with a `trajectory_id`. Returns the sum of its parts."""
        return self._send(calls.reward(trajectory_id, value))

    def trajectories(self) -> dict[str, TrajectoryReport]:
        """Return what became of these completions, by policy."""
        return self._send(calls.trajectories())

    def splits(self) -> dict[str, SplitReport]:
        """Return each name that clients have asked for: its shares, if it is split, and counts of its versions."""
        return self._send(calls.splits())

    def set_split(self, name: str, weights: Mapping[str, float]) -> SplitReport:
        """Let these models answer requests for `name`, by their weights."""
        return self._send(calls.set_split(name, weights))

    def remove_split(self, name: str) -> None:
        self._send(calls.remove_split(name))

    def score(self, texts: Sequence[str], *, model: str | None = None) -> list[float]:
        """Rate texts by the reward model `model`, or by the only one that is loaded."""
        return self._send(calls.score(texts, model))

    def score_completions(
        self, prompt: str | Sequence[Mapping[str, str]], completions: Sequence[str], *, model: str | None = None
    ) -> list[float]:
        """Rate completions of a prompt, or of the messages of a chat."""
        return self._send(calls.score_completions(prompt, completions, model))

    def shares(self) -> dict[str, float]:
        """Return `serving_share` and `engine_share` of the device."""
        return self._send(calls.shares())

    def set_shares(self, *, serving_share: float | None = None, engine_share: float | None = None) -> dict[str, float]:
        """Change one share or both, until the process ends. Returns both."""
        return self._send(calls.set_shares(serving_share, engine_share))

    def cancel(self, request_id: str) -> int:
        """End the requests of this id, which answer with what they have. Returns their number."""
        return self._send(calls.cancel(request_id))

    def _send(self, call: Call[Result]) -> Result:
        url = self._connection.base_url + call.path
        return call.result(self._http.request(call.method, url, headers=self._connection.headers, **call.options()))
