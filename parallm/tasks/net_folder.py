"""Policy nets that clients have published, on the disk: what a server has again after a restart.

The folder is whole after every change:

nets.json       names, versions and forms; replaced in one step after its weights are on the disk
weights/5f0c…   the safetensors file of a version, by its digest
process.lock    the lock of the process that has it
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from parallm.checkpoint.folder_lock import FolderLock
from parallm.checkpoint.format import sync, write_atomically
from parallm.errors import CheckpointError, FolderInUse

FORMAT = 1
STATE, WEIGHTS = "nets.json", "weights"
WAY_OUT = "choose another folder with server.state=FOLDER, or go without by server.state=off"


@dataclass(frozen=True, slots=True)
class StoredNet:
    """One version of a net; its weights lie beside it."""

    name: str
    version: int
    digest: str
    """SHA-256 of its weights."""
    config: str
    """The text of config.json."""
    signature: str | None


@dataclass(frozen=True, slots=True)
class StoredNets:
    nets: tuple[StoredNet, ...] = ()
    highest: Mapping[str, int] = field(default_factory=dict)
    """The highest version ever of each name that clients have changed, forgotten names too."""


class NetFolder:
    """Created and locked by the first change, or by `read` if it holds nets. Methods block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: FolderLock | None = None

    def read(self) -> StoredNets:
        """Lock the folder and return what is there. Raises FolderInUse, and CheckpointError for what cannot be read."""
        if not (self.folder / STATE).is_file():
            return StoredNets()
        try:
            self._take(may_hold_state=True)
            values = json.loads((self.folder / STATE).read_text())
            if values["format"] != FORMAT:
                raise ValueError(f"it has format {values['format']}, this version reads {FORMAT}")
            nets = tuple(StoredNet(**row) for row in values["nets"])
            return StoredNets(nets, {name: int(number) for name, number in values["highest"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self.unreadable(error) from error

    def weights(self, net: StoredNet) -> bytes:
        """Return the safetensors file of a version. Raises CheckpointError for one that is not what was stored."""
        try:
            content = (self.folder / WEIGHTS / net.digest).read_bytes()
        except OSError as error:
            raise self.unreadable(error) from error
        if digest_of(content) != net.digest:
            raise self.unreadable(ValueError(f"{net.name}@{net.version} is not what was stored"))
        return content

    def commit(self, stored: StoredNets, added: Iterable[bytes]) -> None:
        """Store these nets, of which `added` are the weights that are new. Raises FolderInUse, OSError."""
        self._take()
        above = self.folder / WEIGHTS
        for content in added:
            path = above / digest_of(content)
            path.write_bytes(content)
            sync(path)
        sync(above)
        values = {"format": FORMAT, "nets": [asdict(net) for net in stored.nets], "highest": dict(stored.highest)}
        write_atomically(self.folder / STATE, f"{json.dumps(values, indent=2)}\n")
        kept = {net.digest for net in stored.nets}
        for path in above.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"policy nets cannot be read from {self.folder}: {error}; {WAY_OUT}")

    def _take(self, *, may_hold_state: bool = False) -> None:
        if self._lock is not None:
            return
        (self.folder / WEIGHTS).mkdir(parents=True, exist_ok=True)
        lock = FolderLock(self.folder)
        if (self.folder / STATE).is_file() and not may_hold_state:
            lock.release()
            raise FolderInUse(
                f"{self.folder} holds policy nets of another process since this one began; start this one again to go "
                "on with them, or with name=OTHER, server.state=FOLDER or server.state=off"
            )
        self._lock = lock


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
