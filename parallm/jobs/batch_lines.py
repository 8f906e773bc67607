"""The lines of a batch: what its input file must be, and which requests its output files have answered already.

All functions read files of any length line by line and block; call them on a thread.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from parallm.jobs.records import BatchCounts, BatchError, BatchUsage, InputDetails, OutputDetails

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_REQUESTS = 50_000
MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_ERRORS = 100
"""Faults of an input file that are shown."""
MAX_ID = 512


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    body: dict[str, Any]


@dataclass(slots=True)
class Checked:
    """What reading an input file shows."""

    total: int = 0
    models: set[str] = field(default_factory=set)
    errors: list[BatchError] = field(default_factory=list)

    @property
    def model(self) -> str | None:
        return next(iter(self.models)) if len(self.models) == 1 else None


@dataclass(slots=True)
class Progress:
    """What the output and the error file of a batch hold."""

    done: set[str] = field(default_factory=set)
    """Custom ids with a result."""
    counts: BatchCounts = field(default_factory=BatchCounts)
    usage: BatchUsage = field(default_factory=BatchUsage)

    def count(self, row: dict[str, Any]) -> None:
        response = row["response"]
        is_right = response is not None and response["status_code"] == 200
        self.done.add(row["custom_id"])
        completed, failed = self.counts.completed + is_right, self.counts.failed + (not is_right)
        self.counts = self.counts.model_copy(update={"completed": completed, "failed": failed})
        if is_right:
            self.usage = _added(self.usage, response["body"].get("usage") or {})


def check_file(path: Path, endpoint: str) -> Checked:
    """Return the number of requests and the first `MAX_ERRORS` faults."""
    checked, seen = Checked(), set[str]()
    for number, line in _lines(path):
        if checked.total >= MAX_REQUESTS:
            message = f"the file has more than {MAX_REQUESTS} requests; make several batches of it"
            checked.errors.append(BatchError(code="too_many_requests", line=number, message=message))
            break
        request, error = _read(line, number, endpoint)
        if request is not None and request.custom_id in seen:
            message = f"the custom_id {request.custom_id[:100]!r} stands on an earlier line, too; give each its own"
            error = BatchError(code="duplicate_custom_id", line=number, message=message, param="custom_id")
        if error is not None:
            checked.errors.append(error)
            if len(checked.errors) >= MAX_ERRORS:
                break
        elif request is not None:
            seen.add(request.custom_id)
            checked.total += 1
            checked.models.add(str(request.body.get("model", "")))
    if not checked.total and not checked.errors:
        checked.errors.append(BatchError(code="empty_file", message="the file has no requests; write one a line"))
    return checked


def requests_of(path: Path, endpoint: str) -> Iterator[BatchRequest]:
    """Yield the requests of a checked file in their order."""
    for number, line in _lines(path):
        request, error = _read(line, number, endpoint)
        assert request is not None, f"the file was checked: {error}"
        yield request


def read_progress(*files: Path) -> Progress:
    """Return what is done, and cut off the last line of a file where a killed process left it half written."""
    progress = Progress()
    for path in files:
        if not path.exists():
            continue
        with path.open("r+b") as file:
            end = 0
            for line in file:
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                progress.count(json.loads(line))
            file.truncate(end)
    return progress


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield lines with their numbers, without empty ones; one too long is cut, which makes it no JSON."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if line.strip():
                yield number, line
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)


def _read(line: bytes, number: int, endpoint: str) -> tuple[BatchRequest | None, BatchError | None]:
    def wrong(code: str, message: str, param: str | None = None) -> tuple[None, BatchError]:
        return None, BatchError(code=code, line=number, message=message, param=param)

    if len(line) > MAX_LINE_BYTES:
        return wrong("line_too_long", f"the line has more than {MAX_LINE_BYTES} bytes; send that request by itself")
    try:
        row = from_json(line)  # as the server reads bodies: no lone surrogates, which no answer could hold
    except ValueError as error:
        return wrong("invalid_json_line", f"the line is no JSON: {error}")
    if not isinstance(row, dict):
        return wrong("invalid_json_line", "the line is no JSON object; it needs custom_id, method, url and body")
    name, body = row.get("custom_id"), row.get("body")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID:
        return wrong(
            "missing_required_parameter", f"custom_id should be a text of 1 to {MAX_ID} characters", "custom_id"
        )
    if row.get("method") != "POST":
        return wrong("invalid_method", f"method is {row.get('method')!r:.50} and must be POST", "method")
    if row.get("url") != endpoint:
        return wrong("mismatched_url", f"url is {row.get('url')!r:.100}; the batch is for {endpoint}", "url")
    if not isinstance(body, dict):
        return wrong("missing_required_parameter", "body should be the JSON object of the request", "body")
    if body.get("stream"):
        return wrong("invalid_request", "a batch writes whole answers; leave stream out", "body.stream")
    if unknown := sorted(row.keys() - {"custom_id", "method", "url", "body"}):
        return wrong("unknown_parameter", f"unknown field {unknown[0][:50]!r}; leave it out", unknown[0][:50])
    return BatchRequest(name, body), None


def _added(usage: BatchUsage, more: dict[str, Any]) -> BatchUsage:
    """Add the usage of an answer, in the words of chats and completions or of responses."""
    read = more.get("input_tokens", more.get("prompt_tokens", 0))
    written = more.get("output_tokens", more.get("completion_tokens", 0))
    read_details = more.get("input_tokens_details") or more.get("prompt_tokens_details") or {}
    written_details = more.get("output_tokens_details") or more.get("completion_tokens_details") or {}
    cached = usage.input_tokens_details.cached_tokens + (read_details.get("cached_tokens") or 0)
    reasoning = usage.output_tokens_details.reasoning_tokens + (written_details.get("reasoning_tokens") or 0)
    return BatchUsage(
        input_tokens=usage.input_tokens + read,
        input_tokens_details=InputDetails(cached_tokens=cached),
        output_tokens=usage.output_tokens + written,
        output_tokens_details=OutputDetails(reasoning_tokens=reasoning),
        total_tokens=usage.total_tokens + read + written,
    )
