"""What operators have set while a process ran, as far as the next one goes on with it. Pure but for `snapshot`."""

import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from parallm.checkpoint.files import sync, write_atomically
from parallm.checkpoint.folder_lock import FolderLock
from parallm.errors import AdapterError, CheckpointError, FolderInUse
from parallm.model.adapters.adapter import Adapter, Key
from parallm.model.adapters.files import read_adapter, write_exactly
from parallm.model.adapters.table import AdapterTable, is_number, of_alias
from parallm.model.shared_model import SharedModel
from parallm.types import BEST

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """What a policy's bare name means by an operator's wish: until another one, or, if it was the policy's newest
    version, until the trainer publishes the next."""

    version: int
    """0: the base."""
    newest: int
    """The policy's newest version at that time."""

    def holds_at(self, version: int) -> bool:
        """Whether it holds where the policy's newest version is `version`."""
        return self.version < self.newest or version <= self.newest


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingState:
    """Of a table of adapters and of splits."""

    digests: Mapping[Key, str] = field(default_factory=dict)
    """The versions whose weights are kept: of names that operators have changed, and those of policies in training that
    an alias, a split or a promotion pins."""
    served: Mapping[str, int] = field(default_factory=dict)
    """What bare names of the former mean."""
    highest: Mapping[str, int] = field(default_factory=dict)
    """Every name that operators have changed, unloaded ones too, with the highest version that it ever had."""
    aliases: Mapping[str, Key] = field(default_factory=dict)
    """By their plain names."""
    promoted: Mapping[str, Promotion] = field(default_factory=dict)
    """Of policies in training."""
    splits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def pinned(self, name: str) -> int:
        """The highest version of this name whose weights are kept; 0 where none are."""
        return max((version for other, version in self.digests if other == name), default=0)

    def summary(self) -> str:
        """For people, in one line; nothing where nothing is set."""
        names = [f"{name}@{version}" for name, version in sorted(self.served.items())]
        names += [f"{name}@{one.version}" for name, one in sorted(self.promoted.items())]
        names += sorted(f"no {name}" for name in self.highest.keys() - self.served.keys())
        parts = [("", names), ("aliases ", sorted(self.aliases)), ("splits of ", sorted(self.splits))]
        return "; ".join(f"{what}{', '.join(which)}" for what, which in parts if which)


def snapshot(
    before: ServingState, table: AdapterTable, *, changed: Iterable[str], trained: Iterable[str]
) -> ServingState:
    """`before` as `table` is now, where operators have also changed the names `changed`. `trained` are the policies
    whose versions a trainer makes; what it sets there itself is not the operators'."""
    policies, cards = frozenset(trained), table.cards()
    names = (before.highest.keys() | set(changed)) - policies
    aliases = {
        alias: key for alias, key in table.aliases.items() if alias not in {of_alias(BEST, one) for one in policies}
    }
    promoted = {name: one for name, one in before.promoted.items() if served_version(table, name) == one.version}
    pinned = {
        *aliases.values(),
        *split_versions(before.splits),
        *((name, one.version) for name, one in promoted.items()),
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


def split_versions(splits: Mapping[str, Mapping[str, float]]) -> set[Key]:
    """The exact versions that splits name."""
    models = (model.partition("@") for shares in splits.values() for model in shares)
    return {(name, int(version)) for name, _, version in models if is_number(version)}


def to_json(state: ServingState) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "adapters": [
            {"name": name, "version": version, "digest": digest} for (name, version), digest in state.digests.items()
        ],
        "served": dict(state.served),
        "highest": dict(state.highest),
        "aliases": {alias: list(key) for alias, key in state.aliases.items()},
        "promoted": {name: asdict(one) for name, one in state.promoted.items()},
        "splits": {name: dict(shares) for name, shares in state.splits.items()},
    }


def from_json(values: Mapping[str, Any]) -> ServingState:
    """Undo `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
    if values["format"] != FORMAT:
        raise ValueError(f"it has format {values['format']}, this version reads {FORMAT}")
    return ServingState(
        digests={(one["name"], int(one["version"])): one["digest"] for one in values["adapters"]},
        served={name: int(version) for name, version in values["served"].items()},
        highest={name: int(version) for name, version in values["highest"].items()},
        aliases={alias: (name, int(version)) for alias, (name, version) in values["aliases"].items()},
        promoted={name: Promotion(**one) for name, one in values["promoted"].items()},
        splits={name: dict(shares) for name, shares in values["splits"].items()},
    )


def served_version(table: AdapterTable, name: str) -> int:
    """What the bare name of a policy means; 0 is the base."""
    return next((card.version for card in table.cards() if card.name == name and card.is_served), 0)


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
            found = read_adapter(self._path(key, self._stored[key]), self._model.targets, name=name, version=version)
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
        write_atomically(self.folder / STATE, text + "\n")
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
