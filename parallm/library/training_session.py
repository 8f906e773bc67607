"""What the methods of a run share."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from parallm.library.session import Session
from parallm.library.training_result import TrainingResult


@dataclass(slots=True, kw_only=True)
class TrainingSession(Session):
    folder: Path
    stop: Callable[[], None]
    """Let training end after the present step. For any thread."""
    result: Future[TrainingResult]
