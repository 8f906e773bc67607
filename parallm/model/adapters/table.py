"""The adapter versions in memory: which version a name means, and how long a version stays.

The trainer publishes, the server resolves names (`names.py`) and changes aliases, the engine counts running sequences.
A change replaces one immutable `TableState` by another, so readers need no lock.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from parallm.errors import AdapterError, UnknownModel
from parallm.model.adapters.adapter import Adapter, Key
from parallm.model.adapters.names import catalogue_key, check_name, is_number, latest_of, of_alias, plain, versioned
from parallm.types import BASE, BEST, LATEST, POLICY, AdapterCard

RESERVED = {BASE, LATEST, BEST}
"""Names that no adapter can have: trainers and rollouts ask for them."""


@dataclass(slots=True)
class Entry:
    adapter: Adapter
    num_running: int = 0  # written only by acquire and release, under the table's lock
    num_bytes: int = field(init=False)  # counted once: each request asks for the cards of all versions

    def __post_init__(self) -> None:
        self.num_bytes = self.adapter.nbytes

    def card(self, state: "TableState") -> AdapterCard:
        adapter = self.adapter
        return AdapterCard(
            name=adapter.name,
            version=adapter.version,
            parent=adapter.parent,
            step=adapter.step,
            rank=adapter.rank,
            alpha=adapter.alpha,
            rslora=adapter.rslora,
            is_dora=adapter.is_dora,
            aliases=state.aliases_of(adapter.key),
            digest=adapter.digest,
            num_running=self.num_running,
            is_served=state.served.get(adapter.name) == adapter.version,
            num_bytes=self.num_bytes,
            task=adapter.spec,
        )


@dataclass(frozen=True, slots=True)
class TableState:
    """One state of the table; never changed, only replaced."""

    entries: dict[Key, Entry] = field(default_factory=dict)
    aliases: dict[str, Key] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    """Highest published version by name."""
    served: dict[str, int] = field(default_factory=dict)
    """Version that a bare name means; another name is the base if it is a policy's, else unknown."""
    held: frozenset[Key] = frozenset()
    """Versions that stay in memory though nothing else asks for them."""
    unloaded: frozenset[Key] = frozenset()
    """Versions that are in memory only for the sequences that run on them."""

    def present(self) -> list[Key]:
        """Versions that new requests may ask for."""
        return [key for key in self.entries if key not in self.unloaded]

    def aliases_of(self, key: Key) -> tuple[str, ...]:
        latest = (of_alias(LATEST, key[0]),) if key[1] == self.newest.get(key[0]) else ()
        return latest + tuple(sorted(alias for alias, target in self.aliases.items() if target == key))


class AdapterTable:
    """The adapter versions in memory, for use from any thread.

    A publish must not wait for the device thread's unit of work, and sequences end on the device thread: so a lock
    guards the few pointer moves of each change.

    A bare name means the version that is served: the newest one, or the one that `promote` named. Of each name the
    table keeps the newest `keep` versions that no sequence uses, and all that are served, aliased or in use.
    `policies` are the names that mean the base until their first version is served.
    """

    def __init__(self, keep: int = 8, policies: tuple[str, ...] = (POLICY,)) -> None:
        if keep < 1:
            raise AdapterError(f"the adapter table keeps {keep} versions; at least 1 is needed to serve")
        for name in policies:
            check_name(name, taken=RESERVED)
        self._keep = keep
        self.policies = policies
        self._other_names: dict[str, str] = {}
        self._state = TableState()  # swapped whole, so that other threads never see a half-made change
        self.elsewhere: Callable[[str], str | None] = lambda model: None
        """Returns what a name that no adapter has means beside language models, for the error's text."""
        self._lock = threading.RLock()
        self._dropped: set[Key] = set()
        self._num_swaps: Counter[str] = Counter()
        self._highest: dict[str, int] = {}  # version ever published by name: caches rely on none coming again

    def publish(self, adapter: Adapter, *, serve: bool = True) -> None:
        """Make `adapter` the newest version of its name. Moves pointers only; no array is touched.

        Without `serve` the bare name goes on to mean what it meant, and the version waits for `promote`.
        Raises AdapterError, changing nothing, unless its version is above the published one.
        """
        with self._lock:
            highest = self._highest.get(adapter.name)
            if highest is not None and adapter.version <= highest:
                raise AdapterError(
                    f"{adapter.name} is at version {highest}; publish version {highest + 1} or above, "
                    f"not {adapter.version}"
                )
            check_name(adapter.name, taken=RESERVED | set(self._state.aliases))
            entries = self._state.entries | {adapter.key: Entry(adapter)}
            newest = self._state.newest | {adapter.name: adapter.version}
            served = self._state.served | ({adapter.name: adapter.version} if serve else {})
            self._highest[adapter.name] = adapter.version
            self._swap(replace(self._state, entries=entries, newest=newest, served=served))

    def promote(self, version: int, *, name: str = POLICY) -> None:
        """Let the bare name mean `version` from now on, be it older or newer. Sequences that run stay on theirs.

        Version 0 of the policy is the base. Raises UnknownModel if the version is not in memory.
        """
        with self._lock:
            self._pinned(self._state, name, str(version))
            served = {**self._state.served, name: version}
            if (name, version) not in self._state.entries:
                del served[name]
            self._swap(replace(self._state, served=served))

    def roll_back(self, *, name: str = POLICY) -> int:
        """Let the bare name mean the version below the one it means: the next older one in memory, of a policy else
        the base (0). Returns it. Raises UnknownModel if there is none."""
        with self._lock:
            served = self._state.served.get(name)
            if served is None:
                raise UnknownModel(f"{name} has no version to go back from; there are {self._names(self._state)}")
            older = [version for key, version in self._state.present() if key == name and version < served]
            if not older and name not in self.policies:
                raise UnknownModel(
                    f"{name}@{served} is the oldest version of {name}; there are {self._names(self._state)}"
                )
            version = max(older, default=0)
            self.promote(version, name=name)
            return version

    def next_version(self, name: str) -> int:
        """The lowest version that `publish` takes."""
        return self._highest.get(name, 0) + 1

    def unload(self, name: str, version: int | None = None) -> None:
        """Forget one version, or all of `name`; sequences that run finish on theirs, which leave memory then.

        Raises UnknownModel for what is not there, AdapterError for the version that the bare name means.
        """
        with self._lock:
            state = self._state
            doomed = {key for key in state.present() if key[0] == name and version in (None, key[1])}
            if not doomed:
                missing = name if version is None else versioned(name, version)
                raise UnknownModel(f"{missing} is not loaded; there are {self._names(state)}")
            if version is not None and state.served.get(name) == version:
                raise AdapterError(
                    f"{name} means {name}@{version}; promote another version first, or unload all of {name}"
                )
            left = [key[1] for key in state.present() if key[0] == name and key not in doomed]
            newest = {key: newest for key, newest in state.newest.items() if key != name}
            self._swap(
                replace(
                    state,
                    aliases={alias: key for alias, key in state.aliases.items() if key not in doomed},
                    newest=newest | ({name: max(left)} if left else {}),
                    served={key: served for key, served in state.served.items() if (key, served) not in doomed},
                    held=state.held - doomed,
                    unloaded=state.unloaded | doomed,
                )
            )

    def forget(self, name: str) -> None:
        """Unload all versions of `name` and let their numbers come again. The caller drops what was computed with them.

        Raises AdapterError, after unloading, while sequences still run on one.
        """
        with self._lock:
            with suppress(UnknownModel):
                self.unload(name)
            if num_running := sum(entry.num_running for key, entry in self._state.entries.items() if key[0] == name):
                raise AdapterError(
                    f"{num_running} sequences still run on versions of {name}, whose numbers cannot come again yet"
                )
            self._highest.pop(name, None)
            self._dropped = {key for key in self._dropped if key[0] != name}

    def hold(self, models: Iterable[str]) -> None:
        """Keep the versions that these names mean now in memory, and no others of an earlier call.

        Names that mean nothing any more hold nothing.
        """
        with self._lock:
            held: set[Key] = set()
            for model in models:
                with suppress(UnknownModel):
                    adapter = self.resolve(model)
                    held |= set() if adapter is None else {adapter.key}
            self._swap(replace(self._state, held=frozenset(held)))

    def copy(self) -> "AdapterTable":
        """A table in the same state, to try changes out. It shares the arrays."""
        copied = AdapterTable(self._keep, self.policies)
        with self._lock:
            copied._state, copied._highest, copied._dropped = self._state, dict(self._highest), set(self._dropped)
        return copied

    def restore(
        self,
        adapters: Iterable[Adapter],
        *,
        served: Mapping[str, int],
        aliases: Mapping[str, Key],
        held: Iterable[Key],
        highest: Mapping[str, int],
    ) -> None:
        """Put versions of an earlier process back, in place of those with the same key; they may be older than newest.

        Bare names in `highest` mean what `served` says, others what they meant; no later version gets a number up to
        the highest. `aliases` are plain names, `held` versions stay in memory until the next `hold`.
        """
        with self._lock:
            state, restored = self._state, {adapter.key: Entry(adapter) for adapter in adapters}
            newest = dict(state.newest)
            for name, version in (*restored, *highest.items()):
                self._highest[name] = max(version, self._highest.get(name, 0))
            for name, version in restored:
                newest[name] = max(version, newest.get(name, 0))
            kept = {name: version for name, version in state.served.items() if name not in highest}
            self._swap(
                replace(
                    state,
                    entries=state.entries | restored,
                    newest=newest,
                    served=kept | dict(served),
                    aliases=state.aliases | dict(aliases),
                    held=state.held | frozenset(held),
                )
            )

    @property
    def aliases(self) -> Mapping[str, Key]:
        """Keys by plain alias, without the alias of the newest version."""
        return dict(self._state.aliases)

    def resolve(self, model: str) -> Adapter | None:
        """The adapter that `model` means: `base` (None), `policy`, `policy@12` or an alias.

        Before its first version is served a policy is the base. Raises UnknownModel with the choices.
        """
        if self._other_names:
            model = self._other_names.get(catalogue_key(model), model)
        state, asked = self._state, plain(model)
        name, versions = (latest_of(asked), state.newest) if latest_of(asked) else (asked, state.served)
        key = (name, versions[name]) if name in versions else state.aliases.get(asked)
        if key is not None:
            return state.entries[key].adapter
        if asked == BASE or name in self.policies:
            return None
        if elsewhere := self.elsewhere(model):
            raise UnknownModel(elsewhere)
        if "@" in asked:
            return self._pinned(state, *asked.split("@", 1))
        raise UnknownModel(f"no model {model!r}; there are {self._names(state)}")

    def call(self, name: str, meaning: str) -> None:
        """Let a name of a catalogue mean the base or an adapter, in all its spellings."""
        self._other_names[catalogue_key(name)] = meaning

    def keys(self) -> Collection[Key]:
        """All versions in memory."""
        return self._state.entries.keys()

    def holds(self, name: str, version: int) -> bool:
        """Whether this version is in memory."""
        return (name, version) in self._state.entries

    def acquire(self, adapter: Adapter | None) -> None:
        """Count one more running sequence for `adapter`, which stays in memory until released. None: the base."""
        with self._lock:
            if adapter is None:
                return
            entry = self._state.entries.get(adapter.key)
            if entry is None:
                raise UnknownModel(
                    f"{adapter.name}@{adapter.version} was dropped; there are {self._names(self._state)}"
                )
            entry.num_running += 1

    def release(self, adapter: Adapter | None) -> None:
        """Undo one `acquire`; the version may be dropped by this."""
        with self._lock:
            if adapter is None:
                return
            entry = self._state.entries[adapter.key]
            assert entry.num_running > 0, f"{adapter.name}@{adapter.version} released more often than acquired"
            entry.num_running -= 1
            if entry.num_running == 0:
                self._swap(self._state)

    def set_alias(self, alias: str, version: int, *, name: str = POLICY) -> None:
        """Let `name@alias` mean `name@version` until it is set again; the version stays in memory.

        `alias` alone is that of `policy`. Raises UnknownModel if the version is not in memory, AdapterError if the
        alias cannot be used.
        """
        with self._lock:
            check_name(alias, taken={*self._state.newest, *self.policies, BASE, POLICY, LATEST})
            if (name, version) not in self._state.entries:
                self._pinned(self._state, name, str(version))
                raise UnknownModel(f"{name}@{version} is the base; an alias names a published version")
            self._swap(replace(self._state, aliases=self._state.aliases | {of_alias(alias, name): (name, version)}))

    def remove_alias(self, alias: str, *, name: str = POLICY) -> None:
        """Raises UnknownModel."""
        with self._lock:
            removed = of_alias(alias, name)
            if removed not in self._state.aliases:
                raise UnknownModel(f"no alias {removed!r}; there are {self._names(self._state)}")
            aliases = {other: key for other, key in self._state.aliases.items() if other != removed}
            self._swap(replace(self._state, aliases=aliases))

    def cards(self) -> tuple[AdapterCard, ...]:
        """Cards of all versions that requests may ask for, newest first within a name."""
        state = self._state
        keys = sorted(state.present(), key=lambda key: (key[0], -key[1]))
        return tuple(state.entries[key].card(state) for key in keys)

    def num_swaps(self) -> dict[str, int]:
        """Changes of the version that each bare name means."""
        return dict(self._num_swaps)

    def _pinned(self, state: TableState, name: str, number: str) -> Adapter | None:
        if not is_number(number):
            raise UnknownModel(f"{number!r} in {name}@{number} is no version; there are {self._names(state)}")
        key = (name, int(number))
        if key in state.entries and key not in state.unloaded:
            return state.entries[key].adapter
        if key in state.unloaded:
            raise UnknownModel(f"{name}@{number} was unloaded; there are {self._names(state)}")
        if key in self._dropped:
            raise UnknownModel(
                f"{name}@{number} was dropped: the newest {self._keep} versions stay, and those that an alias, a split "
                f"or a request uses; there are {self._names(state)}"
            )
        if name in self.policies and int(number) == 0:
            return None
        raise UnknownModel(f"no version {name}@{number}; there are {self._names(state)}")

    def _swap(self, state: TableState) -> None:
        held = set(state.aliases.values()) | set(state.newest.items()) | set(state.served.items()) | state.held
        idle = sorted((key for key, entry in state.entries.items() if not entry.num_running), key=lambda key: -key[1])
        by_name = [[key for key in idle if key[0] == name] for name in state.newest]
        dropped = {key for keys in by_name for key in keys[self._keep :] if key not in held}
        dropped |= state.unloaded.intersection(idle)
        self._dropped |= dropped  # before the swap: a reader of the new state must find the reason
        entries = {key: entry for key, entry in state.entries.items() if key not in dropped}
        before, after = self._state.served, state.served
        self._num_swaps.update(name for name in before | after if before.get(name) != after.get(name))
        self._state = replace(state, entries=entries, unloaded=state.unloaded - dropped)

    def _names(self, state: TableState) -> str:
        """All names that resolve, for messages."""
        pinned = [versioned(*key) for key in sorted(state.present())]
        latest = [of_alias(LATEST, name) for name in sorted(state.newest)]
        names = [BASE, *self.policies, *sorted(state.served), *latest, *sorted(state.aliases), *pinned]
        return ", ".join(dict.fromkeys(names))
