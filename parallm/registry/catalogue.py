"""The catalogue: models on this disk, their names, and how their loads went, in SQLite.

The disk is the truth; the file holds what a scan found there and what the disk cannot say: names, overlays, pins. Each
change is one transaction, so a process that is killed leaves the state before or after it. Several processes may have
the file open.
"""

import asyncio
import json
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from parallm.errors import ConfigError, ModelError, NotStored, UnknownModel
from parallm.model.adapters.names import catalogue_key
from parallm.registry.discovery import Found, describe, digest_of, find_models, is_model
from parallm.registry.records import Model, Named, Overlay, normal_name

FILE = "catalogue.sqlite"
OWN_MODELS = "models"
"""Folder of models that were created here; only these are deleted with their last name."""
KEPT_LOADS = 8
BUSY_SECONDS = 10.0
MIGRATIONS = (
    """
    CREATE TABLE models(
        id INTEGER PRIMARY KEY, source TEXT NOT NULL UNIQUE, folder TEXT NOT NULL, format TEXT NOT NULL,
        architecture TEXT NOT NULL, parameters INTEGER, quantization TEXT, context INTEGER, hidden INTEGER,
        vocabulary INTEGER, num_bytes INTEGER NOT NULL, digest TEXT NOT NULL, capabilities TEXT NOT NULL,
        license TEXT, modified_at REAL NOT NULL, is_missing INTEGER NOT NULL);
    CREATE TABLE names(
        name TEXT PRIMARY KEY COLLATE NOCASE, model_id INTEGER NOT NULL REFERENCES models(id) ON DELETE CASCADE,
        overlay TEXT, is_pinned INTEGER NOT NULL DEFAULT 0, created_at REAL NOT NULL);
    CREATE INDEX names_of_models ON names(model_id);
    CREATE TABLE loads(
        id INTEGER PRIMARY KEY, model_id INTEGER NOT NULL REFERENCES models(id) ON DELETE CASCADE,
        at REAL NOT NULL, seconds REAL NOT NULL, num_bytes INTEGER, error TEXT);
    CREATE INDEX loads_of_models ON loads(model_id);
    """,
)
"""Scripts that bring a file from version i to i + 1; `user_version` counts them."""
COLUMNS = tuple(field.name for field in fields(Model))

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class Catalogue:
    """The file, and the one thread that uses it. Methods are for the asyncio thread.

    All raise NotStored for a change that the disk does not take.
    """

    def __init__(self, folder: Path, folders: tuple[str, ...] = ()) -> None:
        """Open or make the catalogue in `folder`; models are looked for in `folders`. Raises ConfigError."""
        self.folder = folder
        self._folders = folders
        self._thread = ThreadPoolExecutor(1, "catalogue")
        self._connection = self._thread.submit(_connect, folder).result()

    def close(self) -> None:
        """Safe to call twice."""
        with suppress(RuntimeError):  # it is closed already
            self._thread.submit(self._connection.close)
        self._thread.shutdown()

    async def scan(self) -> tuple[str, ...]:
        """Register what is on the disk, and note what is there no more. Returns the new names.

        A model gets a name when it is seen for the first time, so a deleted name does not come back.
        """
        return await self._run(self._scan)

    async def names(self) -> tuple[Named, ...]:
        """All names in alphabetical order."""
        return await self._run(lambda: tuple(self._select("ORDER BY names.name")))

    async def find(self, name: str) -> Named:
        """Raises UnknownModel, InvalidRequest."""
        return await self._run(lambda: self._find(name))

    async def copy(self, source: str, destination: str) -> None:
        """Let a second name mean what `source` means; it may have meant something else. Raises UnknownModel."""
        found, name = await self.find(source), normal_name(destination)
        await self._run(lambda: self._name(name, found.model.id, found.overlay))

    async def delete(self, name: str) -> None:
        """Forget a name, and with its last name the files of a model that was created here. Raises UnknownModel."""
        await self._run(lambda: self._delete(name))

    async def create(self, name: str, source: str, overlay: Overlay | None = None) -> Named:
        """Let `name` mean a name, a hub id in the cache or a folder, with an overlay in place of that of the name.

        Raises UnknownModel, ModelError, InvalidRequest.
        """
        return await self._run(lambda: self._create(normal_name(name), source, overlay))

    async def pin(self, name: str, *, is_pinned: bool) -> None:
        """Raises UnknownModel."""
        found = await self.find(name)
        await self._run(lambda: self._change("UPDATE names SET is_pinned=? WHERE name=?", (is_pinned, found.name)))

    async def note_load(
        self, model: Model, seconds: float, *, num_bytes: int | None = None, error: str | None = None
    ) -> None:
        """Keep how the load of a model went."""
        await self._run(lambda: self._note_load(model.id, seconds, num_bytes, error))

    async def loaded_bytes(self, model: Model) -> int | None:
        """Bytes that the newest load of a model took; None if it was never loaded."""
        query = "SELECT num_bytes FROM loads WHERE model_id=? AND num_bytes IS NOT NULL ORDER BY id DESC LIMIT 1"
        row = await self._run(lambda: self._connection.execute(query, (model.id,)).fetchone())
        return None if row is None else int(row[0])

    async def _run(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Raises NotStored."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise NotStored(f"the catalogue {self.folder / FILE} cannot be changed: {error}; nothing is") from error

    def _change(self, statement: str, values: Sequence[Any]) -> None:
        with self._transaction() as connection:
            connection.execute(statement, values)

    def _select(self, rest: str, values: Sequence[Any] = ()) -> Iterator[Named]:
        columns = ", ".join(f"models.{column}" for column in COLUMNS)
        query = (
            f"SELECT names.name, names.overlay, names.is_pinned, names.created_at, {columns} "
            f"FROM names JOIN models ON models.id = names.model_id {rest}"
        )
        for name, overlay, is_pinned, created_at, *row in self._connection.execute(query, values):
            yield Named(
                name=name,
                model=_model_of(row),
                overlay=None if overlay is None else _overlay_of(overlay),
                is_pinned=bool(is_pinned),
                created_at=created_at,
            )

    def _find(self, name: str) -> Named:
        found = next(self._select("WHERE names.name = ?", (normal_name(name),)), None)
        if found is None:
            names = [row[0] for row in self._connection.execute("SELECT name FROM names ORDER BY name")]
            close = get_close_matches(catalogue_key(name), names, 3) or names[:8]
            there = f"such as {', '.join(close)}" if close else "there are none"
            raise UnknownModel(f"no model {name[:200]!r} is registered; GET /v1/models shows those that are, {there}")
        return found

    def _scan(self) -> tuple[str, ...]:
        known = {
            row[0]: (row[1], row[2]) for row in self._connection.execute("SELECT source, digest, folder FROM models")
        }
        seen, changed = set(), []
        for found in find_models((*self._folders, str(self.folder / OWN_MODELS))):
            try:
                digest = digest_of(found.folder)
                found.source.encode()  # a name of a file may be no text
                seen.add(found.source)
                if known.get(found.source) != (digest, str(found.folder)):
                    changed.append((found, describe(found.source, found.folder, digest)))
            except (OSError, ValueError, ModelError) as error:
                logger.warning("a model is left out of the catalogue: %r", error)
        new: list[str] = []
        with self._transaction() as connection:
            for found, model in changed:
                model_id = self._register(model)
                if found.source not in known:
                    new.append(self._free_name(found))
                    self._insert_name(new[-1], model_id, None)
            connection.execute("CREATE TEMP TABLE IF NOT EXISTS seen(source TEXT PRIMARY KEY)")
            connection.execute("DELETE FROM seen")
            connection.executemany("INSERT OR IGNORE INTO seen VALUES(?)", [(source,) for source in seen])
            connection.execute("UPDATE models SET is_missing = source NOT IN (SELECT source FROM seen)")
        return tuple(new)

    def _free_name(self, found: Found) -> str:
        """The name that a model suggests, with a number if another model has it."""
        names = [found.name, *(f"{found.name}-{number}" for number in range(2, 1000))]
        taken = "SELECT 1 FROM names WHERE name = ?"
        for name in map(normal_name, names):
            if self._connection.execute(taken, (name,)).fetchone() is None:
                return name
        raise NotStored(f"a thousand models are called {found.name}; rename the folder {found.folder}")

    def _register(self, model: Model) -> int:
        """Insert a model, or replace what is known of it; within a transaction. Returns its number."""
        values = {**asdict(model), "capabilities": ",".join(model.capabilities)}
        del values["id"]
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        updates = ", ".join(f"{name}=excluded.{name}" for name in values)
        row = self._connection.execute(
            f"INSERT INTO models({names}) VALUES({marks}) ON CONFLICT(source) DO UPDATE SET {updates} RETURNING id",
            list(values.values()),
        ).fetchone()
        return int(row[0])

    def _insert_name(self, name: str, model_id: int, overlay: Overlay | None) -> None:
        text = None if overlay is None else json.dumps(asdict(overlay))
        self._connection.execute(
            "INSERT INTO names(name, model_id, overlay, created_at) VALUES(?, ?, ?, ?) ON CONFLICT(name) DO UPDATE SET "
            "model_id=excluded.model_id, overlay=excluded.overlay, created_at=excluded.created_at",
            (name, model_id, text, time.time()),
        )

    def _name(self, name: str, model_id: int, overlay: Overlay | None) -> None:
        with self._transaction():
            self._insert_name(name, model_id, overlay)

    def _create(self, name: str, source: str, overlay: Overlay | None) -> Named:
        path = Path(source).expanduser()
        if path.is_absolute() and is_model(path):
            self._check_place(path)
            model = describe(str(path.absolute()), path.absolute(), digest_of(path))
            with self._transaction():
                self._insert_name(name, self._register(model), overlay)
        else:
            row = self._connection.execute("SELECT id FROM models WHERE source = ?", (source,)).fetchone()
            if row is not None:
                self._name(name, row[0], overlay)
            else:
                found = self._find(source)
                self._name(name, found.model.id, overlay or found.overlay)
        return self._find(name)

    def _check_place(self, path: Path) -> None:
        """Raise ModelError for a folder that is in none of `folders`: clients register no others."""
        roots = [Path(folder).expanduser().resolve() for folder in (*self._folders, str(self.folder))]
        if not any(path.resolve().is_relative_to(root) for root in roots):
            raise ModelError(f"{path} is in none of registry.folders; add its folder there, or move it into one")

    def _delete(self, name: str) -> None:
        found, own = self._find(name), self.folder / OWN_MODELS
        with self._transaction() as connection:
            connection.execute("DELETE FROM names WHERE name = ?", (found.name,))
            others = connection.execute("SELECT 1 FROM names WHERE model_id = ?", (found.model.id,)).fetchone()
            is_own = Path(found.model.folder).is_relative_to(own)
            if others is None and is_own:
                connection.execute("DELETE FROM models WHERE id = ?", (found.model.id,))
        if others is None and is_own:  # after the row: a process that is killed leaves files that a scan finds again
            shutil.rmtree(own / Path(found.model.folder).relative_to(own).parts[0], ignore_errors=True)

    def _note_load(self, model_id: int, seconds: float, num_bytes: int | None, error: str | None) -> None:
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO loads(model_id, at, seconds, num_bytes, error) VALUES(?, ?, ?, ?, ?)",
                (model_id, time.time(), seconds, num_bytes, error),
            )
            connection.execute(
                "DELETE FROM loads WHERE model_id = ? AND id NOT IN "
                "(SELECT id FROM loads WHERE model_id = ? ORDER BY id DESC LIMIT ?)",
                (model_id, model_id, KEPT_LOADS),
            )


def _connect(folder: Path) -> sqlite3.Connection:
    """Open the file, readable for its owner alone, in the newest version. Raises ConfigError."""
    file = folder / FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / OWN_MODELS).mkdir(exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        connection = sqlite3.connect(file, isolation_level=None, timeout=BUSY_SECONDS, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA foreign_keys=ON")
        _migrate(connection, file)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"registry.folder: the catalogue {file} cannot be opened: {error}. Name another folder, or move the file "
            "away: a new one finds the models again, without the names that were given to them"
        ) from error
    return connection


def _migrate(connection: sqlite3.Connection, file: Path) -> None:
    connection.execute("BEGIN IMMEDIATE")  # two processes that begin at once
    try:
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version > len(MIGRATIONS):
            raise ConfigError(
                f"registry.folder: {file} was written by a newer ParaLLM (version {version}, and this one knows "
                f"{len(MIGRATIONS)}); name another folder"
            )
        for script in MIGRATIONS[version:]:
            for statement in script.split(";"):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version={len(MIGRATIONS)}")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _model_of(row: Sequence[Any]) -> Model:
    values = dict(zip(COLUMNS, row, strict=True))
    values["capabilities"] = tuple(name for name in values["capabilities"].split(",") if name)
    values["is_missing"] = bool(values["is_missing"])
    return Model(**values)


def _overlay_of(text: str) -> Overlay:
    overlay = Overlay(**json.loads(text))
    return replace(overlay, messages=tuple(overlay.messages))
