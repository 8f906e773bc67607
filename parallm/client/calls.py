"""Every request of the clients as a value: method, path, body, and how to read its answer. No HTTP happens here."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

import httpx

from parallm.reports import SplitReport, TrainingStatus, TrajectoryReport, VersionReport
from parallm.types import POLICY, AdapterCard, FinishReason, GivenUpdate, WeightSpan

Result = TypeVar("Result")
Record = TypeVar("Record")
Prompt = str | Sequence[int]
"""A text or token ids."""
Reward = float | Mapping[str, float]
"""One number, or parts by name."""


class ApiError(Exception):
    """A request that the server has refused, with HTTP's `status`, and `code` and `param` if the server names them."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def __reduce__(self) -> tuple[Any, ...]:
        return ApiError, (self.status, str(self), self.code, self.param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A completion of `/generate`, and the way back to `/v1/training/update`."""

    request_id: str
    policy_version: int | None
    """The version that the request named; without one, the version that sampled the last token."""
    step_id: int | str | None
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    """Log-probs of `completion_ids`, after temperature."""
    finish_reason: FinishReason
    weight_versions: tuple[WeightSpan, ...]
    """Ranges of `completion_ids`, each with the version that sampled it."""
    model: str
    """Name with the exact version, such as `policy@12`."""
    current_policy_version: int | None
    """Version that sampled the last token."""
    batch_size: int
    latency_ms: float
    temperature: float
    """Temperature of the request."""

    def rewarded(self, reward: float, *, group: str | int | None = None) -> dict[str, Any]:
        """Return a trajectory for `train_on`. It is compared with others of its `group`, or else of its prompt."""
        spans = [{"version": str(span.version), "start": span.start, "end": span.end} for span in self.weight_versions]
        return {
            "prompt_ids": list(self.prompt_ids),
            "completion_ids": list(self.completion_ids),
            "text": self.text,
            "logprobs": list(self.logprobs),
            "weight_versions": spans,
            "temperature": self.temperature,
            "finish_reason": self.finish_reason,
            "reward": reward,
            "group": group,
        }


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """One request, and how to read its answer."""

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    read: Callable[[Any], Result]
    """Reads the JSON of the answer."""
    fields: Mapping[str, Any] | None = None
    """Fields of a JSON body."""
    content: bytes | None = None
    query: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Return arguments for httpx's `request`."""
        body = {} if self.fields is None else {"json": dict(self.fields)}
        return body | ({"params": dict(self.query)} if self.query else {}) | {"content": self.content}

    def result(self, response: httpx.Response) -> Result:
        """Read the answer. Raises ApiError for anything but success."""
        if response.is_success:
            return self.read(response.json())
        try:
            error = response.json()["error"]
            raise ApiError(response.status_code, error["message"], error.get("code"), error.get("param"))
        except (ValueError, KeyError, TypeError):
            # a proxy has answered
            raise ApiError(response.status_code, response.text[:500] or response.reason_phrase) from None


def adapters() -> Call[tuple[AdapterCard, ...]]:
    return Call("GET", "/v1/adapters", lambda answer: tuple(map(_card, answer["data"])))


def generate(
    prompt: Prompt, policy_version: int | None, step_id: int | str | None, fields: Mapping[str, Any]
) -> Call[Generated]:
    if fields.get("n", 1) != 1:
        raise ValueError(f"n is {fields['n']}; several completions are for generate_all")
    asked = _asked(prompt if isinstance(prompt, str) else list(prompt), policy_version, step_id, fields)
    return Call("POST", "/generate", partial(_generated, asked), asked)


def generate_all(
    prompts: Sequence[Prompt], policy_version: int | None, step_id: int | str | None, fields: Mapping[str, Any]
) -> Call[list[Generated]]:
    sent = [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    asked = _asked(sent, policy_version, step_id, fields)
    return Call("POST", "/generate", lambda answers: [_generated(asked, answer) for answer in answers], asked)


def load_adapter(path: str, name: str) -> Call[AdapterCard]:
    return Call("POST", "/v1/adapters/load", _card, {"name": name, "path": path})


def upload_adapter(name: str, archive: bytes) -> Call[AdapterCard]:
    return Call("PUT", f"/v1/adapters/{quote(name, safe='')}", _card, content=archive)


def update_adapter(name: str, weights: bytes) -> Call[AdapterCard]:
    return Call("POST", "/update_adapter_weights", _card, content=weights, query={"name": name})


def unload_adapter(model: str) -> Call[None]:
    return Call("DELETE", f"/v1/adapters/{quote(model, safe='@')}", _nothing)


def promote(version: int, name: str = POLICY) -> Call[None]:
    return Call("POST", "/v1/adapters/promote", _nothing, {"name": name, "version": version})


def roll_back(name: str = POLICY) -> Call[int]:
    return Call("POST", "/v1/adapters/rollback", lambda answer: int(answer["version"]), {"name": name})


def set_alias(alias: str, version: int, name: str = POLICY) -> Call[None]:
    fields = {"alias": alias, "name": name, "version": version}
    return Call("POST", "/v1/adapters/aliases", _nothing, fields)


def remove_alias(alias: str, name: str = POLICY) -> Call[None]:
    path = f"/v1/adapters/{quote(name, safe='')}/aliases/{quote(alias, safe='')}"
    return Call("DELETE", path, _nothing)


def training_status() -> Call[TrainingStatus]:
    return Call("GET", "/v1/training/status", _status)


def steer_training(what: Literal["pause", "resume", "update"], policy: str | None) -> Call[TrainingStatus]:
    return Call("POST", f"/v1/training/{what}", _status, _policy_field(policy))


def train_on(
    trajectories: Sequence[Mapping[str, Any]],
    policy: str | None,
    update_inference: bool | None,
    checkpoint_name: str | None,
) -> Call[GivenUpdate]:
    fields = _policy_field(policy) | {"trajectories": [dict(trajectory) for trajectory in trajectories]}
    more = {"update_inference": update_inference, "checkpoint_name": checkpoint_name}
    fields |= {name: value for name, value in more.items() if value is not None}
    return Call("POST", "/v1/training/update", lambda answer: _record(GivenUpdate, answer["update"]), fields)


def checkpoint(policy: str | None) -> Call[dict[str, str]]:
    return Call("POST", "/v1/training/checkpoint", lambda answer: dict(answer["folders"]), _policy_field(policy))


def reward(trajectory_id: str, value: Reward) -> Call[float]:
    path = f"/v1/trajectories/{quote(trajectory_id, safe='')}/reward"
    sent = dict(value) if isinstance(value, Mapping) else value
    return Call("POST", path, lambda answer: float(answer["reward"]), {"reward": sent})


def trajectories() -> Call[dict[str, TrajectoryReport]]:
    return Call(
        "GET",
        "/v1/trajectories",
        lambda answer: {name: _record(TrajectoryReport, report) for name, report in answer["data"].items()},
    )


def splits() -> Call[dict[str, SplitReport]]:
    return Call("GET", "/v1/splits", lambda answer: {split["name"]: _split(split) for split in answer["data"]})


def set_split(name: str, weights: Mapping[str, float]) -> Call[SplitReport]:
    path = f"/v1/splits/{quote(name, safe='')}"
    return Call("PUT", path, _split, {"weights": dict(weights)})


def remove_split(name: str) -> Call[None]:
    return Call("DELETE", f"/v1/splits/{quote(name, safe='')}", _nothing)


def score(texts: Sequence[str], model: str | None) -> Call[list[float]]:
    return _scores({"input": list(texts)}, model)


def score_completions(
    prompt: str | Sequence[Mapping[str, str]], completions: Sequence[str], model: str | None
) -> Call[list[float]]:
    asked = {"prompt": prompt} if isinstance(prompt, str) else {"messages": [dict(message) for message in prompt]}
    return _scores({**asked, "completions": list(completions)}, model)


def shares() -> Call[dict[str, float]]:
    return Call("GET", "/v1/shares", dict)


def set_shares(serving_share: float | None, engine_share: float | None) -> Call[dict[str, float]]:
    given = {"serving_share": serving_share, "engine_share": engine_share}
    fields = {name: share for name, share in given.items() if share is not None}
    return Call("PUT", "/v1/shares", dict, fields)


def cancel(request_id: str) -> Call[int]:
    path = f"/v1/requests/{quote(request_id, safe='')}/cancel"
    return Call("POST", path, lambda answer: int(answer["aborted"]))


def _asked(
    prompt: object, policy_version: int | None, step_id: int | str | None, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body. The key `policy_version`, even as null, asks for the answer that `_generated` reads."""
    own = {"prompt": prompt, "policy_version": policy_version}
    return {**fields, **own, **({} if step_id is None else {"step_id": step_id})}


def _generated(asked: Mapping[str, Any], values: Mapping[str, Any]) -> Generated:
    tuples = {name: tuple(values[name]) for name in ("prompt_ids", "completion_ids", "logprobs")}
    spans = [
        WeightSpan(version=int(span["version"]), start=span["start"], end=span["end"])
        for span in values["weight_versions"]
    ]
    temperature = asked.get("temperature")
    more = {"weight_versions": tuple(spans), "temperature": 1.0 if temperature is None else float(temperature)}
    return _record(Generated, {**values, **values["metadata"], **tuples, **more})


def _scores(fields: Mapping[str, Any], model: str | None) -> Call[list[float]]:
    named = {} if model is None else {"model": model}
    return Call(
        "POST",
        "/v1/rewards/score",
        lambda answer: [float(entry["score"]) for entry in answer["data"]],
        {**fields, **named},
    )


def _policy_field(policy: str | None) -> dict[str, Any]:
    return {} if policy is None else {"policy": policy}


def _nothing(_: Any) -> None:
    return None


def _card(values: Mapping[str, Any]) -> AdapterCard:
    return _record(AdapterCard, {**values, "aliases": tuple(values["aliases"])})


def _split(values: Mapping[str, Any]) -> SplitReport:
    versions = {name: _record(VersionReport, version) for name, version in values["versions"].items()}
    return _record(SplitReport, {**values, "versions": versions})


def _status(values: Mapping[str, Any]) -> TrainingStatus:
    policies = {name: _status(policy) for name, policy in values["policies"].items()}
    checkpoints = tuple(values.get("available_checkpoints", ()))
    return _record(TrainingStatus, {**values, "policies": policies, "available_checkpoints": checkpoints})


def _record(kind: type[Record], values: Mapping[str, Any]) -> Record:
    """Leave out the fields that only a newer server has."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # all of them are dataclasses
    return kind(**{name: value for name, value in values.items() if name in names})
