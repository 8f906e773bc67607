"""`Jobs`: files, batches and fine-tuning jobs of one folder, which one process at a time has open."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from parallm.checkpoint.folder_lock import folder_locked
from parallm.errors import NotStored
from parallm.jobs.batches import Batches
from parallm.jobs.files import FileStore
from parallm.jobs.fine_tuning import FineTuning
from parallm.jobs.settings import JobSettings
from parallm.jobs.store import JobStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    files: FileStore
    batches: Batches
    tuning: FineTuning
    settings: JobSettings

    def is_idle(self) -> bool:
        """Return whether no batch and no job waits or runs."""
        return not (self.batches.has_open() or self.tuning.has_open())


@contextmanager
def open_jobs(settings: JobSettings, folder: Path, *, base: str) -> Iterator[Jobs]:
    """Open or make the folder. `base` is the path of the model that jobs train. Raises FolderInUse, NotStored."""
    with ExitStack() as resources:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            resources.enter_context(folder_locked(folder))
        except OSError as error:
            raise NotStored(f"{folder} cannot be written: {error}; name another jobs.folder") from error
        store = JobStore(folder / "jobs.sqlite")
        resources.callback(store.close)
        files = FileStore(store, folder / "files", settings)
        batches = Batches(store, files, folder / "batches", settings)
        environments = frozenset(settings.environments)
        tuning = FineTuning(store, files, folder / "runs", base=base, environments=environments)
        files.is_needed = lambda file_id: batches.reader_of(file_id) or tuning.reader_of(file_id)
        files.clean(batches.pending_files())
        yield Jobs(files=files, batches=batches, tuning=tuning, settings=settings)
