"""`/v1/files`: uploads that go to the disk as they come, lists, contents."""

import asyncio
from collections.abc import Callable
from functools import partial

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from parallm.errors import InvalidRequest
from parallm.jobs.jobs import Jobs
from parallm.jobs.records import Purpose
from parallm.server.connection import MAX_FIELD_BYTES, MAX_FIELDS, bounded_chunks, counted, is_form, json_response
from parallm.server.jobs.access import check_query, jobs_of, owner, read_limit, visible_to
from parallm.server.jobs.schemas import FileDeleted, FileList, listed
from parallm.server.request_limits import BodyBudget
from parallm.server.service import Service

UPLOADED: tuple[Purpose, ...] = ("fine-tune", "batch")
MAX_FILES = 10_000
FRAME_BYTES = 65_536
"""Bytes of a form beside its file."""
EXPIRES = ("expires_after[anchor]", "expires_after[seconds]")


def file_routes(service: Service) -> APIRouter:
    router = APIRouter()
    uploads = None if service.jobs is None else BodyBudget(service.jobs.settings.max_stored_bytes, "uploaded files")

    @router.post("/v1/files")
    async def upload(http: Request) -> Response:
        """Store a file: lines of training data (`purpose=fine-tune`) or the requests of a batch (`purpose=batch`)."""
        jobs = jobs_of(service)
        assert uploads is not None, "jobs_of has found some"
        stored = await asyncio.to_thread(jobs.files.num_bytes)
        with uploads.reserve(stored) as grow:

            def check(num_bytes: int) -> None:
                size = max(0, num_bytes - FRAME_BYTES)
                jobs.files.check_place(size, stored)
                grow(size)

            return await store(jobs, http, check)

    async def store(jobs: Jobs, http: Request, check: Callable[[int], None]) -> Response:
        form = await _read_form(http, jobs.settings.max_file_bytes, check)
        try:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise InvalidRequest("the form has no file; send it as the part `file`", "file")
            add = partial(
                jobs.files.add,
                file.file,
                name=file.filename or "",
                purpose=_purpose(form),
                owner=owner(),
                expires_after=_seconds(form),
            )
            return answer(await asyncio.to_thread(add))
        finally:
            await form.close()

    @router.get("/v1/files")
    async def all_files(http: Request) -> Response:
        """Files, the newest first, or only those of a `purpose`."""
        query = http.query_params
        check_query(query, "purpose", "after", "limit", "order")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order is {order[:50]!r}; send asc or desc", "order")
        files = jobs_of(service).files
        find = partial(
            files.page,
            owner=visible_to(),
            purpose=query.get("purpose"),
            after=query.get("after"),
            limit=read_limit(query, usual=MAX_FILES, largest=MAX_FILES),
            newest_first=order == "desc",
        )
        # ten thousand rows are too many for the event loop
        return await asyncio.to_thread(lambda: answer(FileList.model_validate(listed(find()))))

    @router.get("/v1/files/{file_id}")
    async def file(file_id: str) -> Response:
        """One file's size, name and purpose."""
        return answer(jobs_of(service).files.get(file_id, visible_to()))

    @router.get("/v1/files/{file_id}/content")
    async def content(file_id: str) -> Response:
        """The bytes of a file."""
        store = jobs_of(service).files
        return FileResponse(store.path(store.get(file_id, visible_to())), media_type="application/octet-stream")

    @router.delete("/v1/files/{file_id}")
    async def delete(file_id: str) -> Response:
        """Delete a file that no batch and no job reads any more."""
        jobs_of(service).files.delete(file_id, visible_to())
        return json_response(FileDeleted(id=file_id, object="file", deleted=True))

    return router


def answer(record: BaseModel) -> Response:
    """Return an object with all its fields, as OpenAI's API does."""
    return Response(record.model_dump_json(), media_type="application/json")


async def _read_form(http: Request, max_bytes: int, check: Callable[[int], None]) -> FormData:
    """Read a form; its file is on the disk, as a temporary one. Raises BodyTooLarge, BodyTooSlow, and what `check` of
    the bytes so far raises."""
    if not is_form(http):
        raise InvalidRequest("send multipart/form-data with the parts file and purpose", "file")
    chunks = counted(bounded_chunks(http, max_bytes + FRAME_BYTES, "jobs.max_file_bytes"), check)
    parser = MultiPartParser(http.headers, chunks, max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the form cannot be read: {error.message}") from error


def _purpose(form: FormData) -> Purpose:
    given = form.get("purpose")
    if given not in UPLOADED:
        raise InvalidRequest(f"purpose is {given!r:.50}; send {' or '.join(UPLOADED)}", "purpose")
    return UPLOADED[UPLOADED.index(given)]


def _seconds(form: FormData) -> int | None:
    """Return how long the file is to be kept, if the client says so. Raises InvalidRequest."""
    if unknown := sorted(form.keys() - {"file", "purpose", *EXPIRES}):
        raise InvalidRequest(f"unknown part {unknown[0][:50]!r}; leave it out", unknown[0][:50])
    anchor, seconds = (form.get(name) for name in EXPIRES)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at" or not isinstance(seconds, str) or not seconds.isdecimal() or len(seconds) > 9:
        raise InvalidRequest("expires_after needs the anchor created_at and a whole number of seconds", "expires_after")
    return int(seconds)
