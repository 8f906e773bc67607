"""A request of the clients as a value, and what its answer becomes. No HTTP happens here."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import httpx

from parallm.reports import SplitReport, TrainingStatus, VersionReport
from parallm.types import AdapterCard, FinishReason, WeightSpan

Result = TypeVar("Result")
Record = TypeVar("Record")
EVENT, LAST_EVENT = "data: ", "[DONE]"


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
    is_file: bool = False
    """Whether the answer is a file, whose bytes `read` gets."""
    has_lines: bool = False
    """Whether an answer that streams is lines of JSON, as Ollama's, and not server-sent events."""

    def result(self, response: httpx.Response) -> Result:
        """Read the answer. Raises ApiError for anything but success."""
        if response.is_success:
            return self.read(response.content if self.is_file else response.json())
        try:
            raise _refusal(response.status_code, response.json())
        except (ValueError, KeyError, TypeError):
            # a proxy has answered
            raise ApiError(response.status_code, response.text[:500] or response.reason_phrase) from None

    def is_event(self, line: str) -> bool:
        """Whether a line of an answer that streams has an event with content."""
        return bool(line) if self.has_lines else line.startswith(EVENT) and line != EVENT + LAST_EVENT

    def event(self, line: str, status: int) -> Result:
        """Read a line for which `is_event`. Raises ApiError for an error."""
        value = json.loads(line if self.has_lines else line.removeprefix(EVENT))
        if isinstance(value, dict) and "error" in value:
            raise _refusal(status, value)
        return self.read(value)


def _refusal(status: int, answer: Any) -> ApiError:
    """Raises KeyError, TypeError for an answer without an error in it."""
    error = answer["error"]
    if isinstance(error, str):  # Ollama's routes
        return ApiError(status, error)
    return ApiError(status, error["message"], error.get("code"), error.get("param"))


def read_generated(asked: Mapping[str, Any], values: Mapping[str, Any]) -> Generated:
    tuples = {name: tuple(values[name]) for name in ("prompt_ids", "completion_ids", "logprobs")}
    spans = [
        WeightSpan(version=int(span["version"]), start=span["start"], end=span["end"])
        for span in values["weight_versions"]
    ]
    temperature = asked.get("temperature")
    more = {"weight_versions": tuple(spans), "temperature": 1.0 if temperature is None else float(temperature)}
    return read_record(Generated, {**values, **values["metadata"], **tuples, **more})


def read_card(values: Mapping[str, Any]) -> AdapterCard:
    return read_record(AdapterCard, {**values, "aliases": tuple(values["aliases"])})


def read_split(values: Mapping[str, Any]) -> SplitReport:
    versions = {name: read_record(VersionReport, version) for name, version in values["versions"].items()}
    return read_record(SplitReport, {**values, "versions": versions})


def read_status(values: Mapping[str, Any]) -> TrainingStatus:
    policies = {name: read_status(policy) for name, policy in values["policies"].items()}
    checkpoints = tuple(values.get("available_checkpoints", ()))
    return read_record(TrainingStatus, {**values, "policies": policies, "available_checkpoints": checkpoints})


def read_record(kind: type[Record], values: Mapping[str, Any]) -> Record:
    """Leave out the fields that only a newer server has."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # all of them are dataclasses
    return kind(**{name: value for name, value in values.items() if name in names})
