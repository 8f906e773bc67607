"""A lock that allows one process at a time in a folder, and ends with its process. Imports no MLX."""

import errno
import fcntl
import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from parallm.errors import FolderInUse

LOCK = "process.lock"
"""Holds the process id, for people. The file of a killed process locks nothing."""
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

logger = logging.getLogger(__name__)


class FolderLock:
    """An flock on a file in the folder, not shared with processes that this one forks."""

    def __init__(self, folder: Path, name: str = LOCK) -> None:
        """`name` is that of the file; `FILE.lock` locks no more than FILE in the folder.

        Raises FolderInUse with the holder's process id, OSError if the folder cannot be written.
        """
        self._file = folder / name
        self._descriptor: int | None = _locked(self._file)
        os.register_at_fork(after_in_child=partial(_leave_to_parent, weakref.ref(self)))

    def release(self) -> None:
        """Unlock and remove the file. Does nothing the second time."""
        if self._descriptor is not None:
            self._file.unlink(missing_ok=True)
            self.forget()

    def forget(self) -> None:
        """Close the file, which unlocks it unless another process has it open."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def folder_locked(folder: Path) -> Iterator[None]:
    """Raises as `FolderLock` does."""
    lock = FolderLock(folder)
    try:
        yield
    finally:
        lock.release()


def _locked(file: Path) -> int:
    """A descriptor of the locked file."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor, file)
            if _is_in_place(descriptor, file):
                with suppress(OSError):  # a full disk: the lock holds without the number
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, str(os.getpid()).encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed it on release


def _lock(descriptor: int, file: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 20).decode(errors="replace").strip()
        what = file.parent if file.name == LOCK else file.with_suffix("")
        raise FolderInUse(f"{what} is in use by process {holder or 'unknown'}") from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.warning("%s cannot be locked (%s): let no second process use it", file.parent, error.strerror)


def _is_in_place(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _leave_to_parent(lock: "weakref.ref[FolderLock]") -> None:
    held = lock()
    if held is not None:
        held.forget()
