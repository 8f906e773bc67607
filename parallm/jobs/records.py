"""The objects of `/v1/files` and `/v1/batches` as OpenAI's API shows them, which is also how they are stored.

Fields, their names and their values are those of https://github.com/openai/openai-openapi. Times are Unix seconds.
"""

import secrets
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Purpose = Literal["fine-tune", "batch", "batch_output"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
OPEN_BATCHES: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of batches that are not over."""


class JobRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    id: str
    created_at: int


class FileObject(JobRecord):
    object: Literal["file"] = "file"
    bytes: int
    filename: str
    """Name that the client gave; never the name of a file here."""
    purpose: Purpose
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class BatchError(BaseModel):
    code: str
    line: int | None = None
    """Line of the input file, from 1."""
    message: str
    param: str | None = None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchError]


class BatchCounts(BaseModel):
    total: int = 0
    completed: int = 0
    failed: int = 0


class InputDetails(BaseModel):
    cached_tokens: int = 0


class OutputDetails(BaseModel):
    reasoning_tokens: int = 0


class BatchUsage(BaseModel):
    input_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int = 0


class Batch(JobRecord):
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: BatchStatus = "validating"
    model: str | None = None
    """Model of its requests, if all name the same."""
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchCounts = BatchCounts()
    usage: BatchUsage = Field(default_factory=BatchUsage)
    metadata: dict[str, Any] | None = None


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed, such as `file-5f0c...`."""
    return f"{prefix}{secrets.token_hex(12)}"
