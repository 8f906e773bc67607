"""What operators have set while a process ran, as far as the next one goes on with it. Pure but for `snapshot`."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from parallm.model.adapter_table import AdapterTable
from parallm.model.adapter_view import Key
from parallm.model_names import is_number, of_alias
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
