"""Settings of files, batches and fine-tuning jobs."""

from typing import Any, Literal

from pydantic import Field

from parallm.environment.settings import ArithmeticSettings, EnvironmentSettings
from parallm.settings import settings

TrainingPart = Literal["learner", "rollout", "trainer", "checkpoint"]


def _registered() -> dict[str, EnvironmentSettings]:
    return {"arithmetic": ArithmeticSettings()}


@settings
class JobSettings:
    enabled: bool = False
    """Answer `/v1/files`, `/v1/batches` and `/v1/fine_tuning/jobs`."""
    folder: str | None = None
    """Place of files, batches and jobs; null: `jobs` below checkpoints/NAME."""
    max_file_bytes: int = Field(default=512 * 1024 * 1024, ge=1024)
    """Larger files are refused before they are stored."""
    max_stored_bytes: int = Field(default=16 * 1024 * 1024 * 1024, ge=1024)
    """Bytes of all files together; a file beyond them is refused."""
    batch_requests: int = Field(default=16, ge=1, le=1024)
    """Requests of batches that are answered at the same time, of all batches together."""
    environments: dict[str, EnvironmentSettings] = Field(default_factory=_registered)
    """Environments that a reinforcement job may name as its grader, by names of your choice."""
    training: dict[TrainingPart, dict[str, Any]] = Field(default_factory=dict)
    """Keys of `parallm.train` that differ for jobs, such as {learner: {learning_rate: 1e-4}}. What a client says about
    epochs, batch and rate comes on top."""
