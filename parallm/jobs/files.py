"""Files of clients on disk, under names of their own: what a client calls a file is only stored beside it."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO

from parallm.errors import FileTooLarge, InvalidRequest, NotStored, Unavailable
from parallm.jobs.records import FileObject, Purpose, new_id
from parallm.jobs.settings import JobSettings
from parallm.jobs.store import JobStore, Page, Table

MAX_NAME = 255
BATCH_SECONDS = 30 * 24 * 3600
"""Files of requests are kept for 30 days, as by OpenAI, unless a client says otherwise."""
MIN_SECONDS, MAX_SECONDS = 3600, 30 * 24 * 3600
"""Limits of what a client may say."""


class FileStore:
    """Files in a folder, with rows in the table `files`. Methods that read or write content block; call them on a
    thread."""

    def __init__(
        self, store: JobStore, folder: Path, settings: JobSettings, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._table = Table(store, "files", FileObject, "file")
        self._store = store
        self._folder = folder
        self._settings = settings
        self._clock = clock
        self._adding = threading.Lock()
        self.is_needed: Callable[[str], str | None] = lambda _: None
        """Returns what still reads the file with an id, if anything does."""
        folder.mkdir(parents=True, exist_ok=True)

    def clean(self, pending: Collection[str]) -> None:
        """Delete what a killed process had written and not counted yet. `pending`: ids that `adopt` will be given."""
        known = {record.id for record in self._table.all(())} | set(pending)
        for path in self._folder.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)

    def add(
        self, content: BinaryIO, *, name: str, purpose: Purpose, owner: str, expires_after: int | None = None
    ) -> FileObject:
        """Copy `content` to the disk and wait until the disk has it.

        Raises InvalidRequest, FileTooLarge, and NotStored if the disk refuses.
        """
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise InvalidRequest(
                f"the file's name has {len(name)} characters; 1 to {MAX_NAME} that print make one", "file"
            )
        if expires_after is not None and not MIN_SECONDS <= expires_after <= MAX_SECONDS:
            raise InvalidRequest(
                f"expires_after.seconds is {expires_after}; from {MIN_SECONDS} to {MAX_SECONDS} is allowed",
                "expires_after",
            )
        file_id = new_id("file-")
        path = self._folder / file_id
        try:
            with path.open("xb") as file:
                shutil.copyfileobj(content, file)
                size = file.tell()
                file.flush()
                os.fsync(file.fileno())
            with self._adding:
                self._check_size(size, name)
                return self._insert(file_id, size, name, purpose, owner, expires_after)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise NotStored(f"the file was not stored: {error.strerror or error}; make room on the disk") from error
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def adopt(
        self, path: Path, file_id: str, *, name: str, purpose: Purpose, owner: str, expires_after: int | None
    ) -> None:
        """Make a file of this process one of the clients'. May be called again with the same id. Raises NotStored.

        The caps of uploads do not hold: what was computed is not thrown away.
        """
        target = self._folder / file_id
        try:
            if path.exists():
                path.replace(target)
            self._insert(file_id, target.stat().st_size, name, purpose, owner, expires_after)
        except OSError as error:
            raise NotStored(f"{path} cannot be moved to {target}: {error}") from error

    def get(self, file_id: str, owner: str | None = None) -> FileObject:
        """Raises UnknownObject."""
        record = self._table.get(file_id, owner)
        if record.expires_at is not None and record.expires_at <= self._clock() and not self.is_needed(file_id):
            self._remove(file_id)
        return self._table.get(file_id, owner)

    def num_bytes(self) -> int:
        """Return the bytes of all files. Blocks."""
        return sum(record.bytes for record in self._table.all(()))

    def check_place(self, size: int, stored: int) -> None:
        """Raise FileTooLarge if `size` more bytes beside those `stored` are too many."""
        total = self._settings.max_stored_bytes
        if stored + size > total:
            raise FileTooLarge(
                f"the file has {size} bytes or more and the files so far {stored}, the limit of all is {total}; delete "
                "some, or raise jobs.max_stored_bytes",
                "file",
            )

    def path(self, record: FileObject) -> Path:
        return self._folder / record.id

    def page(
        self, *, owner: str | None, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> Page[FileObject]:
        """Raises UnknownObject."""
        self.remove_expired()
        groups = () if purpose is None else (purpose,)
        return self._table.page(owner=owner, groups=groups, after=after, limit=limit, newest_first=newest_first)

    def delete(self, file_id: str, owner: str | None) -> None:
        """Raises UnknownObject, and Unavailable while a batch or a job still reads it."""
        self.get(file_id, owner)
        if reader := self.is_needed(file_id):
            raise Unavailable(f"{file_id} is read by {reader}, which is not over; cancel it, or delete the file later")
        self._remove(file_id)

    def remove_expired(self) -> None:
        now = self._clock()
        for record in self._table.all(()):
            if record.expires_at is not None and record.expires_at <= now and not self.is_needed(record.id):
                self._remove(record.id)

    def _remove(self, file_id: str) -> None:
        self._table.delete(file_id)
        (self._folder / file_id).unlink(missing_ok=True)

    def _check_size(self, size: int, name: str) -> None:
        limit = self._settings.max_file_bytes
        if size > limit:
            raise FileTooLarge(f"{name} has {size} bytes, the limit is {limit}; raise jobs.max_file_bytes", "file")
        self.check_place(size, self.num_bytes())

    def _insert(
        self, file_id: str, size: int, name: str, purpose: Purpose, owner: str, expires_after: int | None
    ) -> FileObject:
        now = int(self._clock())
        if expires_after is None and purpose == "batch":
            expires_after = BATCH_SECONDS
        record = FileObject(
            id=file_id,
            created_at=now,
            bytes=size,
            filename=name,
            purpose=purpose,
            expires_at=None if expires_after is None else now + expires_after,
        )
        self._table.add(record, owner=owner, group=purpose)
        return record
