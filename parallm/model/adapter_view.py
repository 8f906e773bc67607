"""One state of the table of adapter versions."""

from dataclasses import dataclass, field

from parallm.model.adapter import Adapter
from parallm.model_names import of_alias
from parallm.types import LATEST, AdapterCard

Key = tuple[str, int]
"""Name and version."""


@dataclass(slots=True)
class Entry:
    adapter: Adapter
    num_running: int = 0  # written only by acquire and release, under the table's lock

    def card(self, view: "View") -> AdapterCard:
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
            digest=adapter.digest,
            num_running=self.num_running,
            is_served=view.served.get(adapter.name) == adapter.version,
            num_bytes=sum(array.nbytes for array in adapter.arrays.values()),
        )


@dataclass(frozen=True, slots=True)
class View:
    """One state of the table; never changed, only replaced."""

    entries: dict[Key, Entry] = field(default_factory=dict)
    aliases: dict[str, Key] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    """Highest published version by name."""
    served: dict[str, int] = field(default_factory=dict)
    """What a bare name means; a name that is not there is the base if it is the policy, else unknown."""

    held: frozenset[Key] = frozenset()
    """Stay in memory though nothing else asks for them."""
    unloaded: frozenset[Key] = frozenset()
    """In memory for the sequences that run on them alone."""

    def present(self) -> list[Key]:
        """What new requests may ask for."""
        return [key for key in self.entries if key not in self.unloaded]

    def aliases_of(self, key: Key) -> tuple[str, ...]:
        latest = (of_alias(LATEST, key[0]),) if key[1] == self.newest.get(key[0]) else ()
        return latest + tuple(sorted(alias for alias, target in self.aliases.items() if target == key))
