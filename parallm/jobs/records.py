"""The objects of files, batches and fine-tuning jobs as OpenAI's API shows them, which is also how they are stored.

Fields, their names and their values are those of https://github.com/openai/openai-openapi. Times are Unix seconds.
"""

import secrets
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Purpose = Literal["fine-tune", "batch", "batch_output", "fine-tune-results"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
OPEN_BATCHES: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")
"""Statuses of batches that are not over."""


class JobRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

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


JobStatus = Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
OPEN_JOBS: tuple[JobStatus, ...] = ("validating_files", "queued", "running", "paused")
"""Statuses of jobs that are not over."""


class JobError(BaseModel):
    code: str
    message: str
    param: str | None = None


class FineTuningJob(JobRecord):
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    model: str
    """Model that the job starts from."""
    status: JobStatus = "validating_files"
    fine_tuned_model: str | None = None
    """Name for requests, once the job has succeeded."""
    training_file: str
    """Id of a file; empty for an environment, which has problems of its own."""
    validation_file: str | None = None
    method: dict[str, Any]
    hyperparameters: dict[str, Any]
    """Those of the method; `auto` until training begins."""
    seed: int
    finished_at: int | None = None
    estimated_finish: int | None = None
    trained_tokens: int | None = None
    result_files: list[str] = []
    error: JobError | None = None
    organization_id: str = ""
    integrations: list[Any] = []
    metadata: dict[str, Any] | None = None


class JobEvent(JobRecord):
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    level: Literal["info", "warn", "error"] = "info"
    message: str
    type: Literal["message", "metrics"] = "message"
    data: dict[str, Any] | None = None


class CheckpointMetrics(BaseModel):
    step: int
    train_loss: float | None = None
    train_mean_token_accuracy: float | None = None
    valid_loss: float | None = None
    valid_mean_token_accuracy: float | None = None
    full_valid_loss: float | None = None
    full_valid_mean_token_accuracy: float | None = None
    train_mean_reward: float | None = None
    """Mean reward of the completions that the step was trained on; a reinforcement job's, as the next two."""
    valid_mean_reward: float | None = None
    valid_accuracy: float | None = None
    """Share of held-out problems with a right greedy completion, at the newest evaluation."""


class JobCheckpoint(JobRecord):
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    fine_tuned_model_checkpoint: str
    """Name for requests."""
    fine_tuning_job_id: str
    step_number: int
    metrics: CheckpointMetrics


def new_id(prefix: str) -> str:
    """Return an id that cannot be guessed, such as `file-5f0c...`."""
    return f"{prefix}{secrets.token_hex(12)}"
