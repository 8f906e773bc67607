"""Adapters and the table of their versions. Files are `adapter_files`; how a forward applies an adapter is `lora`."""

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

import mlx.core as mx

from parallm.errors import AdapterError, UnknownModel
from parallm.model.adapter_arrays import REWARD_HEAD, arrays_digest, check_arrays, check_finite
from parallm.model_names import check_name, is_number, latest_of, of_alias, plain, versioned
from parallm.types import BASE, LATEST, POLICY, AdapterCard

Key = tuple[str, int]
Value = TypeVar("Value", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One version of a LoRA or DoRA adapter. Immutable, arrays evaluated; made by `make_adapter`."""

    name: str
    version: int
    parent: int | None
    """The version that this one was trained from."""
    step: int
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    """Sites with another rank than `rank`."""
    alphas: Mapping[str, float]
    """Sites with another alpha than `alpha`; files of PEFT may have them."""
    rslora: bool
    """Scaled by alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732) rather than by alpha / rank."""
    dropout: float
    targets: tuple[str, ...]
    """Module paths of the sites, sorted, e.g. "model.layers.0.self_attn.q_proj"."""
    arrays: Mapping[str, mx.array]
    """`{site}.lora_a` (inputs, rank), `.lora_b` (rank, outputs), for DoRA `.m` (outputs,), and REWARD_HEAD; float32."""
    sha256: str
    """Digest of the arrays alone: equal for equal weights, whatever their version."""

    @property
    def is_dora(self) -> bool:
        return f"{self.targets[0]}.m" in self.arrays

    @property
    def scales(self) -> dict[str, float]:
        """Factor of each site's product."""
        ranks = {site: self.ranks.get(site, self.rank) for site in self.targets}
        divisors = {site: math.sqrt(rank) if self.rslora else rank for site, rank in ranks.items()}
        return {site: self.alphas.get(site, self.alpha) / divisor for site, divisor in divisors.items()}

    @property
    def num_parameters(self) -> int:
        return sum(array.size for array in self.arrays.values())

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def make_adapter(
    arrays: Mapping[str, mx.array],
    *,
    version: int,
    rank: int,
    alpha: float,
    ranks: Mapping[str, int] = MappingProxyType({}),
    alphas: Mapping[str, float] = MappingProxyType({}),
    rslora: bool = False,
    name: str = POLICY,
    parent: int | None = None,
    step: int = 0,
    dropout: float = 0.0,
) -> Adapter:
    """An adapter of `arrays`, which are cast to float32, evaluated and hashed here; float32 arrays are not copied.

    `ranks` and `alphas` are those of sites that differ from `rank` and `alpha`. Raises AdapterError if there is no
    site, if a site lacks an array, or if an array is not of its rank, AdapterNotFinite if one holds NaN or infinity.
    """
    single = {key: arrays[key].astype(mx.float32) for key in sorted(arrays)}
    targets = tuple(sorted({key.rpartition(".")[0] for key in single if key != REWARD_HEAD}))
    check_arrays(targets, single, {site: ranks.get(site, rank) for site in targets})
    mx.eval(single)
    check_finite(single)
    return Adapter(
        name=name,
        version=version,
        parent=parent,
        step=step,
        rank=rank,
        alpha=float(alpha),
        ranks=_exceptions(ranks, rank, targets),
        alphas=_exceptions(alphas, float(alpha), targets),
        rslora=rslora,
        dropout=float(dropout),
        targets=targets,
        arrays=MappingProxyType(single),
        sha256=arrays_digest(single),
    )


def next_version(adapter: Adapter, arrays: Mapping[str, mx.array], step: int) -> Adapter:
    """The version after `adapter`, of the same form, with the arrays that `step` steps have made."""
    return make_adapter(
        arrays,
        name=adapter.name,
        version=adapter.version + 1,
        parent=adapter.version,
        step=step,
        rank=adapter.rank,
        alpha=adapter.alpha,
        ranks=adapter.ranks,
        alphas=adapter.alphas,
        rslora=adapter.rslora,
        dropout=adapter.dropout,
    )


class AdapterTable:
    """The adapter versions in memory, for use from any thread.

    A publish must not wait for the device thread's unit of work, and sequences end on the device thread: so a lock
    guards the few pointer moves of each change. Readers need none.

    A bare name means the version that is served: the newest one, or the one that `promote` has named. Of each name the
    table keeps the newest `keep` versions that no sequence uses, and all that are served, aliased or in use.
    `policies` are the names that mean the base until their first version is served.
    """

    def __init__(self, keep: int = 8, policies: tuple[str, ...] = (POLICY,)) -> None:
        if keep < 1:
            raise AdapterError(f"the adapter table keeps {keep} versions; at least 1 is needed to serve")
        for name in policies:
            check_name(name, taken={BASE, LATEST})
        self._keep = keep
        self._policies = policies
        self._view = _View()  # swapped whole, so that other threads never see a half-made change
        self._lock = threading.RLock()
        self._dropped: set[Key] = set()

    def publish(self, adapter: Adapter, *, serve: bool = True) -> None:
        """Make `adapter` the newest version of its name. Moves pointers only; no array is touched.

        Without `serve` the bare name goes on to mean what it meant, and the version waits for `promote`.
        Raises AdapterError, changing nothing, unless its version is above the published one.
        """
        with self._lock:
            newest = self._view.newest.get(adapter.name)
            if newest is not None and adapter.version <= newest:
                raise AdapterError(
                    f"{adapter.name} is at version {newest}; publish version {newest + 1} or above, "
                    f"not {adapter.version}"
                )
            check_name(adapter.name, taken=set(self._view.aliases) | {BASE, LATEST})
            entries = self._view.entries | {(adapter.name, adapter.version): _Entry(adapter)}
            newest_versions = self._view.newest | {adapter.name: adapter.version}
            served = self._view.served | ({adapter.name: adapter.version} if serve else {})
            self._swap(replace(self._view, entries=entries, newest=newest_versions, served=served))

    def promote(self, version: int, *, name: str = POLICY) -> None:
        """Let the bare name mean `version` from now on, be it older or newer. Sequences that run stay on theirs.

        Version 0 of the policy is the base. Raises UnknownModel if the version is not in memory.
        """
        with self._lock:
            self._pinned(self._view, name, str(version))
            served = {**self._view.served, name: version}
            if (name, version) not in self._view.entries:
                del served[name]
            self._swap(replace(self._view, served=served))

    def resolve(self, model: str) -> Adapter | None:
        """The adapter that `model` means: `base` (None), `policy`, `policy@12` or an alias; see `model_names`.

        Before its first version is served a policy is the base. Raises UnknownModel with the choices.
        """
        view, wanted = self._view, plain(model)
        name, versions = (latest_of(wanted), view.newest) if latest_of(wanted) else (wanted, view.served)
        key = (name, versions[name]) if name in versions else view.aliases.get(wanted)
        if key is not None:
            return view.entries[key].adapter
        if wanted == BASE or name in self._policies:
            return None
        if "@" in wanted:
            return self._pinned(view, *wanted.split("@", 1))
        raise UnknownModel(f"no model {model!r}; there are {self._names(view)}")

    def acquire(self, adapter: Adapter | None) -> None:
        """Count one more running sequence for `adapter`, which stays in memory until released. None: the base."""
        with self._lock:
            if adapter is None:
                return
            entry = self._view.entries.get((adapter.name, adapter.version))
            if entry is None:
                raise UnknownModel(f"{adapter.name}@{adapter.version} was dropped; there are {self._names(self._view)}")
            entry.num_running += 1

    def release(self, adapter: Adapter | None) -> None:
        """Undo one `acquire`; the version may be dropped by this."""
        with self._lock:
            if adapter is None:
                return
            entry = self._view.entries[(adapter.name, adapter.version)]
            assert entry.num_running > 0, f"{adapter.name}@{adapter.version} released more often than acquired"
            entry.num_running -= 1
            if entry.num_running == 0:
                self._swap(self._view)

    def set_alias(self, alias: str, version: int, *, name: str = POLICY) -> None:
        """Let `name@alias` mean `name@version` until it is set again; the version stays in memory.

        `alias` alone is that of `policy`. Raises UnknownModel if the version is not in memory, AdapterError if the
        alias cannot be used.
        """
        with self._lock:
            check_name(alias, taken={*self._view.newest, *self._policies, BASE, POLICY, LATEST})
            if (name, version) not in self._view.entries:
                self._pinned(self._view, name, str(version))
                raise UnknownModel(f"{name}@{version} is the base; an alias names a published version")
            self._swap(replace(self._view, aliases=self._view.aliases | {of_alias(alias, name): (name, version)}))

    def cards(self) -> tuple[AdapterCard, ...]:
        """What is in memory, newest first within a name."""
        view = self._view
        keys = sorted(view.entries, key=lambda key: (key[0], -key[1]))
        return tuple(view.entries[key].card(view) for key in keys)

    def _pinned(self, view: "_View", name: str, number: str) -> Adapter | None:
        if not is_number(number):
            raise UnknownModel(f"{number!r} in {name}@{number} is no version; there are {self._names(view)}")
        key = (name, int(number))
        if key in view.entries:
            return view.entries[key].adapter
        if key in self._dropped:
            raise UnknownModel(f"{name}@{number} was dropped to bound memory; there are {self._names(view)}")
        if name in self._policies and int(number) == 0:
            return None
        raise UnknownModel(f"no version {name}@{number}; there are {self._names(view)}")

    def _swap(self, view: "_View") -> None:
        held = set(view.aliases.values()) | set(view.newest.items()) | set(view.served.items())
        idle = sorted((key for key, entry in view.entries.items() if not entry.num_running), key=lambda key: -key[1])
        of_names = [[key for key in idle if key[0] == name] for name in view.newest]
        dropped = {key for keys in of_names for key in keys[self._keep :] if key not in held}
        self._dropped |= dropped  # before the swap: a reader of the new view must find the reason
        self._view = replace(view, entries={key: e for key, e in view.entries.items() if key not in dropped})

    def _names(self, view: "_View") -> str:
        """Every name that resolves, for messages."""
        pinned = [versioned(*key) for key in sorted(view.entries)]
        names = [BASE, *self._policies, *sorted(view.served), *sorted(view.aliases), *pinned]
        return ", ".join(dict.fromkeys(names))


@dataclass(slots=True)
class _Entry:
    adapter: Adapter
    num_running: int = 0  # written only by acquire and release, under the table's lock

    def card(self, view: "_View") -> AdapterCard:
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
            aliases=view.aliases_of((adapter.name, adapter.version)),
            sha256=adapter.sha256,
            num_running=self.num_running,
            is_served=view.served.get(adapter.name) == adapter.version,
        )


@dataclass(frozen=True, slots=True)
class _View:
    """One state of the table; never changed, only replaced."""

    entries: dict[Key, _Entry] = field(default_factory=dict)
    aliases: dict[str, Key] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    """Highest published version by name."""
    served: dict[str, int] = field(default_factory=dict)
    """What a bare name means; a name that is not there is the base if it is the policy, else unknown."""

    def aliases_of(self, key: Key) -> tuple[str, ...]:
        latest = (LATEST,) if key == (POLICY, self.newest.get(POLICY)) else ()
        return latest + tuple(sorted(alias for alias, target in self.aliases.items() if target == key))


def _exceptions(values: Mapping[str, Value], usual: Value, targets: tuple[str, ...]) -> Mapping[str, Value]:
    return MappingProxyType({s: values[s] for s in targets if s in values and values[s] != usual})
