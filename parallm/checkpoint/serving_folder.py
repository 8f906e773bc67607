"""A folder with what operators have set and the weights of the adapters it needs: whole after every change.

serving.json                what is set; replaced in one step after the weights that it names are on the disk
adapters/poet@3-5f0c1a/     one version, as a checkpoint holds it, with the beginning of its digest
process.lock                while a process has it
"""

import json
import logging
import shutil
from pathlib import Path

from parallm.checkpoint.files import sync, write_durably
from parallm.checkpoint.folder_lock import FolderLock
from parallm.checkpoint.serving_state import ServingState, from_json, to_json
from parallm.errors import AdapterError, CheckpointError, FolderInUse
from parallm.model.adapter import Adapter
from parallm.model.adapter_files import read_adapter, write_exactly
from parallm.model.adapter_view import Key
from parallm.model.shared_model import SharedModel

logger = logging.getLogger(__name__)

STATE = "serving.json"
ADAPTERS = "adapters"
WAY_OUT = "choose another folder with server.state=FOLDER, or go without by server.state=off"


class ServingFolder:
    """Made and locked by the first change, or by `read` where there is something to read."""

    def __init__(self, folder: Path, model: SharedModel) -> None:
        self.folder = folder
        self._model = model
        self._lock: FolderLock | None = None
        self._stored: dict[Key, str] = {}  # digests of the versions on disk

    def read(self) -> ServingState:
        """What an earlier process has left, and the lock on it; an empty state where there is none.

        Raises FolderInUse where another process goes on with it, CheckpointError for one that cannot be gone on with.
        """
        if not (self.folder / STATE).is_file():
            return ServingState()
        try:
            self._take(may_hold_state=True)
        except OSError as error:
            logger.warning("what operators have set is restored, and changes will be refused: %s", error)
        try:
            values = json.loads((self.folder / STATE).read_text())
            base, state = values["base_sha256"], from_json(values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._unreadable(error) from error
        if base != self._model.sha256:
            raise CheckpointError(
                f"{self.folder} is about the base with the sha256 {base[:12]}, this one has {self._model.sha256[:12]}; "
                f"{WAY_OUT}"
            )
        self._stored = dict(state.digests)
        return state

    def read_adapter(self, key: Key) -> Adapter:
        """The weights of a version. Runs on the device thread. Raises CheckpointError."""
        name, version = key
        try:
            found = read_adapter(self._path(key, self._stored[key]), self._model.sites, name=name, version=version)
        except AdapterError as error:
            raise self._unreadable(error) from error
        if found.digest != self._stored[key]:
            raise self._unreadable(ValueError(f"{name}@{version} is not what was stored"))
        return found

    def missing(self, state: ServingState) -> list[Key]:
        """The versions of `state` to stage before it is committed."""
        return [key for key, digest in state.digests.items() if self._stored.get(key) != digest]

    def stage(self, adapter: Adapter) -> None:
        """Write the weights of a version, which the next `commit` names. Runs on the device thread.

        Raises FolderInUse, OSError.
        """
        self._take()
        path = self._path((adapter.name, adapter.version), adapter.digest)
        shutil.rmtree(path, ignore_errors=True)
        write_exactly(
            adapter,
            path,
            num_layers=self._model.num_layers,
            base_name=self._model.name,
            base_sha256=self._model.sha256,
        )

    def commit(self, state: ServingState) -> None:
        """Let the folder hold `state`, whose weights were staged; may block. Raises FolderInUse, OSError."""
        self._take()
        added = self.missing(state)
        for key in added:
            path = self._path(key, state.digests[key])
            for part in (*path.iterdir(), path):
                sync(part)
        if added:
            sync(self.folder / ADAPTERS)
        text = json.dumps({"base_sha256": self._model.sha256, **to_json(state)}, indent=2)
        write_durably(self.folder / STATE, text + "\n")
        self._stored = dict(state.digests)
        self._remove_others()

    def discard(self) -> None:
        """Remove what was staged and not committed."""
        if self._lock is not None:
            self._remove_others()

    def close(self) -> None:
        """Let other processes have it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _take(self, *, may_hold_state: bool = False) -> None:
        """Make and lock the folder. Raises FolderInUse, also for a state that another process has left meanwhile."""
        if self._lock is not None:
            return
        (self.folder / ADAPTERS).mkdir(parents=True, exist_ok=True)
        try:
            lock = FolderLock(self.folder)
        except FolderInUse as error:
            raise FolderInUse(
                f"{error}, which keeps there what operators set; ask that one, or start this one with name=OTHER, "
                "server.state=FOLDER or server.state=off"
            ) from error
        if (self.folder / STATE).is_file() and not may_hold_state:
            lock.release()
            raise FolderInUse(
                f"{self.folder} holds what operators have set in another process since this one began; start this one "
                "again to go on with it, or with name=OTHER, server.state=FOLDER or server.state=off"
            )
        self._lock = lock

    def _path(self, key: Key, digest: str) -> Path:
        return self.folder / ADAPTERS / f"{key[0]}@{key[1]}-{digest[:12]}"

    def _remove_others(self) -> None:
        """Weights that nothing names any more, or that a process had staged when it was killed."""
        wanted = {self._path(key, digest).name for key, digest in self._stored.items()}
        for path in (self.folder / ADAPTERS).iterdir():
            if path.name not in wanted:
                shutil.rmtree(path, ignore_errors=True)

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"what operators have set cannot be read from {self.folder}: {error}; {WAY_OUT}")
