"""Rows of files, batches and jobs in one SQLite file, each with its owner. A killed process loses no committed change.

Ids come from clients and reach SQL as parameters only. For the event loop and for threads: a lock lets one in at a
time, and a call takes well below a millisecond, but for long pages.
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from parallm.errors import NotStored, UnknownObject
from parallm.jobs.records import JobRecord

Record = TypeVar("Record", bound=JobRecord)
BUSY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Page(Generic[Record]):
    records: list[Record]
    has_more: bool


class JobStore:
    """The database. `tables` share its connection; `changing` makes several changes one."""

    def __init__(self, file: Path) -> None:
        """Raises NotStored if the file cannot be opened, or is no database."""
        self.lock = threading.RLock()
        self._is_changing = False  # under the lock
        try:
            self.connection = sqlite3.connect(file, timeout=BUSY_SECONDS, check_same_thread=False, isolation_level=None)
            # without a wait for the disk: what was committed outlives the process, not always a loss of power
            self.connection.execute("PRAGMA journal_mode=WAL")
            self.connection.execute("PRAGMA synchronous=NORMAL")
        except sqlite3.Error as error:
            raise NotStored(f"{file} cannot be opened: {error}; move it away, or name another jobs.folder") from error

    @contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """Make all changes inside, or none. May be nested. Raises NotStored."""
        with self.lock:
            if self._is_changing:
                yield self.connection
                return
            self._is_changing = True
            try:
                self.connection.execute("BEGIN IMMEDIATE")
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException as error:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise NotStored(f"nothing was changed: the database of jobs refuses: {error}") from error
                raise
            finally:
                self._is_changing = False

    def close(self) -> None:
        with self.lock:
            self.connection.close()


class Table(Generic[Record]):
    """Records of one kind, in the order of their creation. `group` is what they are listed by, such as a status.

    `owner` is the name of a client's key. None in a question means every owner.
    """

    def __init__(self, store: JobStore, name: str, kind: type[Record], what: str) -> None:
        """`what` names the kind in messages."""
        self._store = store
        self._name = name
        self._kind = kind
        self._what = what
        with store.changing() as connection:
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {name} (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL,"
                " owner TEXT NOT NULL, part TEXT NOT NULL, record TEXT NOT NULL, request TEXT NOT NULL)"
            )
            connection.execute(f"CREATE INDEX IF NOT EXISTS {name}_part ON {name} (part, number)")

    def add(self, record: Record, *, owner: str, group: str, request: str = "") -> None:
        """Add a record, and the request for it, which no client sees. A second one of its id changes nothing."""
        with self._store.changing() as connection:
            connection.execute(
                f"INSERT OR IGNORE INTO {self._name} (id, owner, part, record, request) VALUES (?, ?, ?, ?, ?)",
                (record.id, owner, group, record.model_dump_json(), request),
            )

    def put(self, record: Record, *, group: str) -> None:
        """Replace the record with this id."""
        with self._store.changing() as connection:
            connection.execute(
                f"UPDATE {self._name} SET part = ?, record = ? WHERE id = ?",
                (group, record.model_dump_json(), record.id),
            )

    def get(self, name: str, owner: str | None = None) -> Record:
        """Raises UnknownObject, also for what is another owner's."""
        row = self._row("record", name, owner)
        return self._kind.model_validate_json(row)

    def request(self, name: str) -> str:
        """Return what `add` got. Raises UnknownObject."""
        return self._row("request", name, None)

    def owner(self, name: str) -> str:
        """Raises UnknownObject."""
        return self._row("owner", name, None)

    def delete(self, name: str) -> None:
        with self._store.changing() as connection:
            connection.execute(f"DELETE FROM {self._name} WHERE id = ?", (name,))

    def page(
        self,
        *,
        owner: str | None = None,
        groups: Sequence[str] = (),
        after: str | None = None,
        limit: int,
        newest_first: bool = True,
    ) -> Page[Record]:
        """Return at most `limit` records, those behind the id `after` if it is given. Raises UnknownObject for it."""
        conditions, values = [], list[object]()
        if owner is not None:
            conditions.append("owner = ?")
            values.append(owner)
        if groups:
            conditions.append(f"part IN ({', '.join('?' * len(groups))})")
            values.extend(groups)
        if after is not None:
            conditions.append(f"number {'<' if newest_first else '>'} ?")
            values.append(self._row("number", after, owner))
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        order = "DESC" if newest_first else "ASC"
        with self._store.lock:
            rows = self._store.connection.execute(
                f"SELECT record FROM {self._name} {where} ORDER BY number {order} LIMIT ?", (*values, limit + 1)
            ).fetchall()
        return Page([self._kind.model_validate_json(row[0]) for row in rows[:limit]], len(rows) > limit)

    def all(self, groups: Sequence[str]) -> list[Record]:
        """Return all records of these groups, oldest first."""
        return self.page(groups=groups, limit=2**31, newest_first=False).records

    def _row(self, column: str, name: str, owner: str | None) -> str:
        with self._store.lock:
            row = self._store.connection.execute(
                f"SELECT {column}, owner FROM {self._name} WHERE id = ?", (name,)
            ).fetchone()
        if row is None or owner not in (None, row[1]):
            raise UnknownObject(f"no {self._what} {name[:100]!r}")
        value: str = row[0]
        return value
