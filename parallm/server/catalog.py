"""Names of models: the list that clients see, and which adapter version a name stands for."""

from collections.abc import Sequence

from parallm.errors import UnknownModel
from parallm.model_names import latest_of, plain, versioned
from parallm.server.answer_schemas import ModelEntry, ModelList
from parallm.server.service import Service
from parallm.types import BASE, POLICY, AdapterCard


def card_of(model: str, cards: Sequence[AdapterCard]) -> AdapterCard | None:
    """The card that `model` stands for: the version of an adapter that is served, an exact version or an alias."""
    name = plain(model)
    if newest_of := latest_of(name):
        return max((card for card in cards if card.name == newest_of), key=lambda card: card.version, default=None)
    served = next((card for card in cards if card.name == name and card.is_served), None)
    if served is not None:
        return served
    return next((card for card in cards if name in (versioned(card.name, card.version), *card.aliases)), None)


def resolved(name: str, cards: Sequence[AdapterCard], policies: Sequence[str]) -> str:
    """`name@version` for what `name` stands for now; `name` itself if it is the base or not known here.

    `policies` are the base before their first version.
    """
    card = card_of(name, cards)
    if card is not None:
        return versioned(card.name, card.version)
    adapter = latest_of(plain(name)) or plain(name)
    return versioned(adapter, 0) if adapter in policies else name


def resolved_to(name: str, version: int | None, cards: Sequence[AdapterCard]) -> str:
    """`name@version` for a request for `name` that `version` has answered; there may be newer ones by now."""
    if name == BASE or version is None:
        return name
    wanted = latest_of(plain(name)) or plain(name)
    is_alias = any(wanted in card.aliases for card in cards)
    return versioned(POLICY if is_alias and "@" not in wanted else wanted.partition("@")[0], version)


def served_policy(service: Service) -> str:
    """Return the policy of requests that name none: the only one, or the first of several."""
    return service.policies[0] if service.policies else BASE


def served_version(service: Service) -> int:
    """Return the version that the bare name of that policy means; 0 for the base."""
    card = card_of(served_policy(service), service.catalog())
    return 0 if card is None else card.version


def model_list(service: Service) -> ModelList:
    """The policies, the base, other names of adapters (the version that is served), aliases, and every version.

    Policies come first because many clients take the first model of the list.
    """
    cards = service.catalog()
    names = {card.name for card in cards} | {alias for card in cards for alias in card.aliases}
    names -= set(service.policies)
    versions = [versioned(card.name, card.version) for card in cards]
    order = (*service.policies, BASE, *sorted(names), *versions)
    return ModelList(object="list", data=[_entry(name, card_of(name, cards), service) for name in order])


def model_entry(name: str, service: Service) -> ModelEntry:
    """One name of the list, or another way to say it. Raises UnknownModel."""
    entries = {entry.id: entry for entry in model_list(service).data}
    if name in entries:
        return entries[name]
    card = card_of(name, service.catalog())
    if card is None:
        raise UnknownModel(f"no model {name[:200]!r}; there are {sorted(entries)}")
    return _entry(name, card, service)


def _entry(name: str, card: AdapterCard | None, service: Service) -> ModelEntry:
    """Without a card it is the base, which is also what the policy is before its first version."""
    parent = BASE if card is None or not card.parent else versioned(card.name, card.parent)
    return ModelEntry(
        id=name,
        object="model",
        created=service.started,
        owned_by="parallm",
        root=service.base_name,
        parent=None if name == BASE else parent,
        max_model_len=service.engine.max_context,
        policy_version=0 if card is None else card.version,
    )
