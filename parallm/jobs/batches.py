"""Batches: the requests of files, answered behind everything else, with their answers in files.

A batch is answered by the application itself, so its answers are those of HTTP. Each answer is a line of a file as soon
as it is there: a process that starts again reads these lines and answers the others, so none is answered twice.
"""

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from parallm.errors import InvalidRequest, NotStored, UnknownObject
from parallm.jobs.batch_lines import (
    ENDPOINTS,
    BatchRequest,
    Progress,
    check_file,
    read_progress,
    requests_of,
)
from parallm.jobs.files import FileStore
from parallm.jobs.records import OPEN_BATCHES, Batch, BatchError, BatchErrors, BatchStatus, new_id
from parallm.jobs.retries import Retries
from parallm.jobs.settings import JobSettings
from parallm.jobs.store import JobStore, Page, Table

WINDOW_SECONDS = 24 * 3600
LATER = (429, 503, 504)
"""Statuses that say to come again: the queue is full, the engine is not there, other requests were served first."""
OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"
LINES_AT_ONCE = 64
MAX_AT_WORK = 4
"""Batches that are answered at the same time. One that has to wait leaves its place to another one."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """The application's answer to one request."""

    status: int
    request_id: str
    body: Mapping[str, Any]


Ask = Callable[[str, Mapping[str, Any]], Awaitable[Answer]]
"""Sends a body to a path of the application, behind all other requests."""


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    anchor: Literal["created_at"]
    seconds: int


class BatchRequestBody(Protocol):
    """What a client asks a batch for."""

    @property
    def input_file_id(self) -> str: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def metadata(self) -> dict[str, str] | None: ...
    @property
    def output_expires_after(self) -> ExpiresAfter | None: ...


class Batches:
    """Batches of all clients, the oldest first, some at a time. Used on the event loop.

    A batch whose requests are to come again later waits, each time twice as long, while others go on.
    """

    def __init__(
        self,
        store: JobStore,
        files: FileStore,
        folder: Path,
        settings: JobSettings,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._table = Table(store, "batches", Batch, "batch")
        self._store = store
        self._files = files
        self._folder = folder
        self._num_at_once = settings.batch_requests
        self._clock = clock
        self._changed = asyncio.Event()
        """Set when a batch is made or to be cancelled."""
        self._looks: dict[str, asyncio.Event] = {}
        """Events of the batches at work, set when a batch is to look whether it goes on."""
        self._retries = Retries(time.monotonic)

    def pending_files(self) -> list[str]:
        """Ids of output files that are about to become files of clients."""
        ids = [(batch.output_file_id, batch.error_file_id) for batch in self._table.all(("finalizing",))]
        return [file_id for pair in ids for file_id in pair if file_id is not None]

    def has_open(self) -> bool:
        """Return whether a batch is not over."""
        return bool(self._table.page(groups=OPEN_BATCHES, limit=1).records)

    def reader_of(self, file_id: str) -> str | None:
        """Return the open batch that reads this file."""
        return next((batch.id for batch in self._table.all(OPEN_BATCHES) if batch.input_file_id == file_id), None)

    def create(self, body: BatchRequestBody, owner: str, visible_to: str | None) -> Batch:
        """Raises InvalidRequest, UnknownObject."""
        if body.endpoint not in ENDPOINTS:
            raise InvalidRequest(
                f"endpoint is {body.endpoint[:100]!r}; choose one of {', '.join(ENDPOINTS)}", "endpoint"
            )
        file = self._files.get(body.input_file_id, visible_to)
        if file.purpose != "batch":
            raise InvalidRequest(
                f"{file.id} has the purpose {file.purpose}; upload the requests with purpose=batch", "input_file_id"
            )
        now = int(self._clock())
        batch = Batch(
            id=new_id("batch_"),
            created_at=now,
            endpoint=body.endpoint,
            input_file_id=file.id,
            expires_at=now + WINDOW_SECONDS,
            metadata=body.metadata,
        )
        expires = body.output_expires_after
        self._table.add(batch, owner=owner, group=batch.status, request="" if expires is None else str(expires.seconds))
        self._changed.set()
        return batch

    def get(self, name: str, owner: str | None) -> Batch:
        """Raises UnknownObject."""
        return self._table.get(name, owner)

    def page(self, *, owner: str | None, after: str | None, limit: int) -> Page[Batch]:
        """Raises UnknownObject."""
        return self._table.page(owner=owner, after=after, limit=limit)

    def cancel(self, name: str, owner: str | None) -> Batch:
        """Let a batch end with the answers so far. Raises UnknownObject, and InvalidRequest for one that is over."""
        batch = self._table.get(name, owner)
        if batch.status == "cancelling":
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise InvalidRequest(f"{batch.id} is {batch.status}, so there is nothing to cancel", "batch_id")
        self._retries.forget(batch.id)
        cancelled = self._put(batch, "cancelling", cancelling_at=int(self._clock()))
        self._changed.set()
        return cancelled

    async def run(self, ask: Ask) -> None:
        """Answer batches until it is cancelled."""
        slots = asyncio.Semaphore(self._num_at_once)

        async def ask_in_turn(path: str, body: Mapping[str, Any]) -> Answer:
            async with slots:
                return await ask(path, body)

        at_work: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                self._changed.clear()
                await asyncio.to_thread(self._files.remove_expired)
                waiting = [batch for batch in self._table.all(OPEN_BATCHES) if batch.id not in at_work]
                due = [batch for batch in waiting if self._retries.is_due(batch.id)]
                for batch in due[: MAX_AT_WORK - len(at_work)]:
                    self._looks[batch.id] = asyncio.Event()
                    at_work[batch.id] = asyncio.create_task(self._work_at(batch, ask_in_turn))
                later = [batch.id for batch in waiting if batch not in due] if len(at_work) < MAX_AT_WORK else []
                await self._until_change(at_work.values(), self._retries.seconds_until(later))
                for name in [name for name, task in at_work.items() if task.done()]:
                    del self._looks[name]
                    at_work.pop(name).result()
        finally:
            for task in at_work.values():
                task.cancel()
            if at_work:
                await asyncio.wait(at_work.values())

    async def _until_change(self, at_work: Collection[asyncio.Task[None]], seconds: float | None) -> None:
        """Wait until a batch has changed, was left or is due, and let those at work look at themselves."""
        changed = asyncio.create_task(self._changed.wait())
        await asyncio.wait((changed, *at_work), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        if self._changed.is_set():
            for look in self._looks.values():
                look.set()

    async def _work_at(self, batch: Batch, ask: Ask) -> None:
        """Do what comes next for a batch. What fails ends this batch alone."""
        try:
            await self._advance(batch, ask)
        except (OSError, NotStored) as error:
            logger.error("batch %s waits, since the disk does not take its answers: %s", batch.id, error)
            self._retries.failed(batch.id)
        except UnknownObject as error:
            self._fail(batch, f"its input is gone: {error}")
        except Exception as error:  # or it would end the batches of all clients, at each start again
            batch = self._table.get(batch.id)
            if batch.status == "finalizing":  # its answers are there, and a start hands them over
                raise
            logger.exception("batch %s has failed", batch.id)
            self._fail(batch, f"the server failed, its log has the cause: {type(error).__name__}")

    async def _advance(self, batch: Batch, ask: Ask) -> None:
        """Do what comes next for a batch."""
        if batch.status == "validating":
            await self._validate(batch)
        elif batch.status == "in_progress":
            await self._answer(batch, ask)
        elif batch.status == "cancelling":
            await self._finalize(batch)
        else:
            await self._hand_over(batch)

    async def _validate(self, batch: Batch) -> None:
        path = self._files.path(self._files.get(batch.input_file_id))
        checked = await asyncio.to_thread(check_file, path, batch.endpoint)
        batch = self._table.get(batch.id)
        if batch.status != "validating":  # cancelled meanwhile
            return
        if checked.errors:
            errors = BatchErrors(data=checked.errors)
            self._put(batch, "failed", failed_at=int(self._clock()), errors=errors)
            return
        counts = batch.request_counts.model_copy(update={"total": checked.total})
        now = int(self._clock())
        self._put(batch, "in_progress", in_progress_at=now, request_counts=counts, model=checked.model)

    async def _answer(self, batch: Batch, ask: Ask) -> None:
        """Answer what is not answered yet, until the batch is through, cancelled or expired, or has to wait."""
        folder = self._folder / batch.id
        folder.mkdir(parents=True, exist_ok=True)
        work = _Work(folder, await asyncio.to_thread(read_progress, folder / OUTPUT, folder / ERRORS))
        before, look = len(work.progress.done), self._looks[batch.id]
        answering = asyncio.create_task(self._answer_all(batch, ask, work))
        try:
            while not answering.done():
                look.clear()
                seconds = (batch.expires_at or 0) - self._clock()
                if seconds <= 0 or self._table.get(batch.id).status != "in_progress":
                    break
                looked = asyncio.create_task(look.wait())
                await asyncio.wait((answering, looked), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                looked.cancel()
            has_ended = answering.done()
        finally:
            answering.cancel()
            try:
                await asyncio.wait((answering,))
            finally:  # also where this task is cancelled as the last answer is there
                work.close()
        if has_ended and not answering.result():
            has_progressed = len(work.progress.done) > before
            left = max(0.0, (batch.expires_at or 0) - self._clock())
            self._retries.failed(batch.id, has_progressed=has_progressed, within=left)
            return
        self._retries.forget(batch.id)
        await self._finalize(self._table.get(batch.id), is_expired=not has_ended)

    async def _answer_all(self, batch: Batch, ask: Ask, work: "_Work") -> bool:
        """Return whether all requests have answers; False as soon as one is to come again later."""
        path = self._files.path(self._files.get(batch.input_file_id))
        places, must_wait = asyncio.Semaphore(self._num_at_once), asyncio.Event()

        async def answer(request: BatchRequest) -> None:
            try:
                answered = await ask(batch.endpoint, request.body)
            finally:
                places.release()
            if answered.status in LATER:
                must_wait.set()
                return
            work.write(_row(request, answered))
            present = self._table.get(batch.id)
            self._table.put(self._with(present, work.progress), group=present.status)

        requests = requests_of(path, batch.endpoint)
        try:
            async with asyncio.TaskGroup() as group:
                while some := await asyncio.to_thread(list, islice(requests, LINES_AT_ONCE)):
                    for request in some:
                        if request.custom_id not in work.progress.done:
                            await places.acquire()
                            if must_wait.is_set():
                                return False
                            group.create_task(answer(request))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return not must_wait.is_set()

    async def _finalize(self, batch: Batch, *, is_expired: bool = False) -> None:
        """Note the ids of the output files before anything is moved, so that a second start moves the same."""
        folder = self._folder / batch.id
        if is_expired and batch.status == "in_progress":
            await asyncio.to_thread(self._write_expired, batch)
        progress = await asyncio.to_thread(read_progress, folder / OUTPUT, folder / ERRORS)
        ids = {
            key: new_id("file-")
            for key, name in (("output_file_id", OUTPUT), ("error_file_id", ERRORS))
            if (folder / name).exists() and (folder / name).stat().st_size
        }
        batch, now = self._table.get(batch.id), int(self._clock())  # it may have been cancelled meanwhile
        expired = {"expired_at": now} if is_expired and batch.status == "in_progress" else {}
        await self._hand_over(self._put(self._with(batch, progress), "finalizing", finalizing_at=now, **ids, **expired))

    async def _hand_over(self, batch: Batch) -> None:
        """Make the output files those of the client, and end the batch."""
        folder, owner = self._folder / batch.id, self._table.owner(batch.id)
        asked = self._table.request(batch.id)
        for file_id, name in ((batch.output_file_id, OUTPUT), (batch.error_file_id, ERRORS)):
            if file_id is not None:
                title = f"{batch.id}_{name}"
                await asyncio.to_thread(
                    self._files.adopt,
                    folder / name,
                    file_id,
                    name=title,
                    purpose="batch_output",
                    owner=owner,
                    expires_after=int(asked) if asked else None,
                )
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        now = int(self._clock())
        if batch.cancelling_at is not None:
            self._put(batch, "cancelled", cancelled_at=now)
        elif batch.expired_at is not None:
            self._put(batch, "expired")
        else:
            self._put(batch, "completed", completed_at=now)

    def _write_expired(self, batch: Batch) -> None:
        """Write an error for each request that has no answer."""
        folder = self._folder / batch.id
        work = _Work(folder, read_progress(folder / OUTPUT, folder / ERRORS))
        path = self._files.path(self._files.get(batch.input_file_id))
        try:
            for request in requests_of(path, batch.endpoint):
                if request.custom_id not in work.progress.done:
                    work.write(_row(request, None))
        finally:
            work.close()

    def _with(self, batch: Batch, progress: Progress) -> Batch:
        counts = progress.counts.model_copy(update={"total": batch.request_counts.total})
        return batch.model_copy(update={"request_counts": counts, "usage": progress.usage})

    def _fail(self, batch: Batch, message: str) -> None:
        errors = BatchErrors(data=[BatchError(code="invalid_file", message=message, param="input_file_id")])
        self._put(batch, "failed", failed_at=int(self._clock()), errors=errors)

    def _put(self, batch: Batch, status: BatchStatus, **fields: Any) -> Batch:
        changed = batch.model_copy(update={"status": status, **fields})
        self._table.put(changed, group=status)
        return changed


class _Work:
    """The output files of a batch while it is answered."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.progress = progress
        self._files = {True: (folder / OUTPUT).open("ab"), False: (folder / ERRORS).open("ab")}

    def write(self, row: dict[str, Any]) -> None:
        """Append a result. A killed process leaves it whole, half written as the last line, or not at all."""
        response = row["response"]
        file = self._files[response is not None and response["status_code"] == 200]
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        self.progress.count(row)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _row(request: BatchRequest, answer: Answer | None) -> dict[str, Any]:
    """Return the line of an answer, or of a request that was not answered in time, in OpenAI's form."""
    row: dict[str, Any] = {"id": new_id("batch_req_"), "custom_id": request.custom_id, "response": None, "error": None}
    if answer is None:
        message = "This request could not be executed before the completion window expired."
        return row | {"error": {"code": "batch_expired", "message": message}}
    if any(choice.get("finish_reason") == "abort" for choice in answer.body.get("choices", ())):
        message = "The request was ended before its answer was complete: by an operator, or by values not finite."
        return row | {"error": {"code": "request_aborted", "message": message}}
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
    return row | {"response": response}
