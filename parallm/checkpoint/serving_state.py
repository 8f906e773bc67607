"""Settings of operators that outlive the process: the state, and the folder that stores it.

The folder is whole after every change:

serving.json                the state; replaced in one step after its weights are on the disk
adapters/poet@3-5f0c1a/     one version as a checkpoint holds it, with the beginning of its digest
process.lock                the lock of the process that has it
"""

import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from parallm.checkpoint.folder_lock import FolderLock
from parallm.checkpoint.format import sync, write_atomically
from parallm.errors import AdapterError, CheckpointError, FolderInUse
from parallm.model.adapters.adapter import Adapter, Key
from parallm.model.adapters.files import read_adapter, write_exactly
from parallm.model.adapters.names import is_number, of_alias
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.types import BEST

FORMAT = 1
STATE = "serving.json"
ADAPTERS = "adapters"
WAY_OUT = "choose another folder with server.state=FOLDER, or go without by server.state=off"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """A version that an operator promoted under a policy's bare name. It lasts until the next promotion, or, if it was
    the newest version, until the trainer publishes the next."""

    version: int
    """0: the base."""
    newest: int
    """The policy's newest version at the time."""

    def holds_at(self, version: int) -> bool:
        """Whether it still holds when the policy's newest version is `version`."""
        return self.version < self.newest or version <= self.newest


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingState:
    """The operators' changes to an adapter table and to traffic splits."""

    digests: Mapping[Key, str] = field(default_factory=dict)
    """Digests of the stored versions: all of names that operators changed, and versions of trained policies that an
    alias, a split or a promotion pins."""
    served: Mapping[str, int] = field(default_factory=dict)
    """The served version of each name that operators changed."""
    highest: Mapping[str, int] = field(default_factory=dict)
    """The highest version ever of each name that operators changed, unloaded names too."""
    aliases: Mapping[str, Key] = field(default_factory=dict)
    promoted: Mapping[str, Promotion] = field(default_factory=dict)
    """Promotions of trained policies."""
    splits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def pinned(self, name: str) -> int:
        """The highest stored version of this name; 0 if there is none."""
        return max((version for other, version in self.digests if other == name), default=0)

    def summary(self) -> str:
        """One line for people; empty if nothing is set."""
        names = [f"{name}@{version}" for name, version in sorted(self.served.items())]
        names += [f"{name}@{promotion.version}" for name, promotion in sorted(self.promoted.items())]
        names += sorted(f"no {name}" for name in self.highest.keys() - self.served.keys())
        parts = [("", names), ("aliases ", sorted(self.aliases)), ("splits of ", sorted(self.splits))]
        return "; ".join(f"{what}{', '.join(which)}" for what, which in parts if which)


def snapshot(
    before: ServingState, table: AdapterTable, *, changed: Iterable[str], trained: Iterable[str]
) -> ServingState:
    """`before` updated to `table`, in which operators have changed the names `changed`.

    `trained`: policies whose versions a trainer makes; its own changes are not recorded.
    """
    policies, cards = frozenset(trained), table.cards()
    names = (before.highest.keys() | set(changed)) - policies
    aliases = {
        alias: key
        for alias, key in table.aliases.items()
        if alias not in {of_alias(BEST, policy) for policy in policies}
    }
    promoted = {
        name: promotion
        for name, promotion in before.promoted.items()
        if served_version(table, name) == promotion.version
    }
    pinned = {
        *aliases.values(),
        *split_versions(before.splits),
        *((name, promotion.version) for name, promotion in promoted.items()),
    }
    names |= {name for name, _ in pinned} - policies
    kept = [card for card in cards if card.name in names or (card.name, card.version) in pinned]
    return replace(
        before,
        digests={(card.name, card.version): card.digest for card in kept},
        served={card.name: card.version for card in kept if card.is_served and card.name in names},
        highest={name: table.next_version(name) - 1 for name in names},
        aliases=aliases,
        promoted=promoted,
    )


def split_models(splits: Mapping[str, Mapping[str, float]]) -> list[str]:
    return [model for shares in splits.values() for model in shares]


def split_versions(splits: Mapping[str, Mapping[str, float]]) -> set[Key]:
    """Versions that splits name exactly."""
    models = (model.partition("@") for model in split_models(splits))
    return {(name, int(version)) for name, _, version in models if is_number(version)}


def to_json(state: ServingState) -> dict[str, Any]:
    values = asdict(state)
    digests = values.pop("digests").items()
    rows = [{"name": name, "version": version, "digest": digest} for (name, version), digest in digests]
    return {"format": FORMAT, "adapters": rows, **values}


def from_json(values: Mapping[str, Any]) -> ServingState:
    """Undo `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
    if values["format"] != FORMAT:
        raise ValueError(f"it has format {values['format']}, this version reads {FORMAT}")
    return ServingState(
        digests={(row["name"], int(row["version"])): row["digest"] for row in values["adapters"]},
        served={name: int(version) for name, version in values["served"].items()},
        highest={name: int(version) for name, version in values["highest"].items()},
        aliases={alias: (name, int(version)) for alias, (name, version) in values["aliases"].items()},
        promoted={name: Promotion(**promotion) for name, promotion in values["promoted"].items()},
        splits={name: dict(shares) for name, shares in values["splits"].items()},
    )


def served_version(table: AdapterTable, name: str) -> int:
    """The version that a policy's bare name serves; 0 is the base."""
    return next((card.version for card in table.cards() if card.name == name and card.is_served), 0)


class ServingFolder:
    """Created and locked by the first change, or by `read` if the folder holds a state."""

    def __init__(self, folder: Path, model: SharedModel) -> None:
        self.folder = folder
        self._model = model
        self._lock: FolderLock | None = None
        self._stored: dict[Key, str] = {}  # digests of the versions on disk

    def read(self) -> ServingState:
        """Lock the folder and read the state of an earlier process; an empty state if there is none.

        Raises FolderInUse if another process has the folder, CheckpointError if the state cannot be used.
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
        """Read the weights of a version. Runs on the device thread. Raises CheckpointError."""
        name, version = key
        try:
            adapter = read_adapter(self._path(key, self._stored[key]), self._model.targets, name=name, version=version)
        except AdapterError as error:
            raise self._unreadable(error) from error
        if adapter.digest != self._stored[key]:
            raise self._unreadable(ValueError(f"{name}@{version} is not what was stored"))
        return adapter

    def missing(self, state: ServingState) -> list[Key]:
        """Versions to stage before `state` is committed."""
        return [key for key, digest in state.digests.items() if self._stored.get(key) != digest]

    def stage(self, adapter: Adapter) -> None:
        """Write the weights of a version for the next `commit`. Runs on the device thread.

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
        """Store `state`, whose weights were staged; may block. Raises FolderInUse, OSError."""
        self._take()
        added = self.missing(state)
        for key in added:
            path = self._path(key, state.digests[key])
            for part in (*path.iterdir(), path):
                sync(part)
        if added:
            sync(self.folder / ADAPTERS)
        text = json.dumps({"base_sha256": self._model.sha256, **to_json(state)}, indent=2)
        write_atomically(self.folder / STATE, text + "\n")
        self._stored = dict(state.digests)
        self._remove_others()

    def discard(self) -> None:
        """Remove weights that were staged and not committed."""
        if self._lock is not None:
            self._remove_others()

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _take(self, *, may_hold_state: bool = False) -> None:
        """Create and lock the folder. Raises FolderInUse, also if another process has stored a state meanwhile."""
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
        """Remove weights that the state does not name, including staged ones of a killed process."""
        kept_names = {self._path(key, digest).name for key, digest in self._stored.items()}
        for path in (self.folder / ADAPTERS).iterdir():
            if path.name not in kept_names:
                shutil.rmtree(path, ignore_errors=True)

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"what operators have set cannot be read from {self.folder}: {error}; {WAY_OUT}")
