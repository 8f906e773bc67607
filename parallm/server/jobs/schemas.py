"""Wire types of files and batches beside the objects themselves, which `parallm/jobs/records.py` has."""

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from parallm.jobs.batches import ExpiresAfter
from parallm.jobs.records import Batch, FileObject, JobRecord
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
