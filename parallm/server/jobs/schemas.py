"""Wire types of files, batches and fine-tuning jobs; the objects themselves are in `parallm/jobs/records.py`."""

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from parallm.jobs.batches import ExpiresAfter
from parallm.jobs.plan import Hyperparameters, ReinforcementHyperparameters
from parallm.jobs.records import Batch, FileObject, FineTuningJob, JobCheckpoint, JobEvent, JobRecord
from parallm.jobs.store import Page
from parallm.server.schemas import Wire

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
Record = TypeVar("Record", bound=JobRecord)


class ObjectList(BaseModel, Generic[Record]):
    """A page of a list; `after` of the next one is `last_id`."""

    object: Literal["list"] = "list"
    data: list[Record]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(ObjectList[FileObject]):
    pass


class BatchList(ObjectList[Batch]):
    pass


class FileDeleted(Wire):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchBody(Wire):
    input_file_id: str = Field(max_length=512)
    endpoint: str = Field(max_length=512)
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


def listed(page: Page[Record]) -> dict[str, object]:
    """Return the fields of an `ObjectList`."""
    ids = [record.id for record in page.records]
    return {
        "data": page.records,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": page.has_more,
    }


class JobList(ObjectList[FineTuningJob]):
    pass


class EventList(ObjectList[JobEvent]):
    pass


class CheckpointList(ObjectList[JobCheckpoint]):
    pass


class SupervisedMethod(Wire):
    hyperparameters: Hyperparameters | None = None


class ReinforcementMethod(Wire):
    grader: dict[str, Any]
    """string_check, text_similarity or multi, as OpenAI describes them; or {"type": "environment", "name": ...}."""
    hyperparameters: ReinforcementHyperparameters | None = None


class Method(Wire):
    type: Literal["supervised", "reinforcement", "dpo"]
    """`dpo` is refused: no preferences are trained on here."""
    supervised: SupervisedMethod | None = None
    reinforcement: ReinforcementMethod | None = None


class FineTuningBody(Wire):
    model: str = Field(min_length=1, max_length=512)
    """The base, or an adapter to train further."""
    training_file: str = Field(default="", max_length=512)
    """Id of a file with the purpose fine-tune; left out or empty where an environment has the problems."""
    validation_file: str | None = Field(default=None, max_length=512)
    method: Method | None = None
    """Absent: supervised."""
    hyperparameters: Hyperparameters | None = None
    """Those of a supervised job without `method`."""
    suffix: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]{0,64}$")
    """Part of the name of the model."""
    seed: int | None = Field(default=None, ge=0, lt=2**31)
    metadata: Metadata | None = None
