"""Names of models: the list that clients see, and which adapter version a name stands for."""

import re
from collections.abc import Sequence
from typing import TypeVar

from parallm.errors import InvalidRequest, UnknownModel
from parallm.model.adapters.names import is_number, latest_of, of_alias, plain, versioned
from parallm.server.schemas import GenerationBody, ModelEntry, ModelList
from parallm.server.service import Service
from parallm.types import BASE, BEST, LATEST, POLICY, AdapterCard


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


CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,9})")
BEST_PERFORMANCE = "best-performance"
BASE_MODEL = "base-model"
"""Name of the base in requests with `lora_adapter`."""

Body = TypeVar("Body", bound=GenerationBody)


def with_lora_adapter(service: Service, body: Body) -> Body:
    """Return the body with `lora_adapter` as its `model`. Raises InvalidRequest where `model` names another adapter."""
    if body.lora_adapter is None:
        return body
    adapter = model_of(service, body.lora_adapter)
    if not _agree(service, body.model, adapter):
        raise InvalidRequest(
            f"model is {body.model[:100]!r} and lora_adapter is {body.lora_adapter[:100]!r}; leave one of them out, or "
            f"send {BASE!r} as the model",
            "lora_adapter",
        )
    return body.model_copy(update={"model": adapter, "lora_adapter": None})


def model_of(service: Service, lora_adapter: str) -> str:
    """Return the model's name: `checkpoint-12` is version 12 of the policy, `best-performance` its best version.

    Raises InvalidRequest where these could mean several policies.
    """
    if card_of(lora_adapter, service.catalog()) is not None:
        return lora_adapter
    number = CHECKPOINT.fullmatch(lora_adapter)
    if number is None and lora_adapter not in (BEST_PERFORMANCE, LATEST):
        return lora_adapter
    if len(service.policies) > 1:
        raise InvalidRequest(
            f"{lora_adapter} could be one of {', '.join(service.policies)}; name one, such as "
            f"{versioned(service.policies[0], 12)} or {of_alias(BEST, service.policies[0])}",
            "lora_adapter",
        )
    policy = served_policy(service)
    if number is not None:
        return versioned(policy, int(number[1]))
    return of_alias(BEST if lora_adapter == BEST_PERFORMANCE else LATEST, policy)


def version_called(service: Service, name: str, word: str) -> int:
    """Return the version of `name` that `checkpoint-12`, `12`, `best-performance`, `latest` or an alias means.

    Raises UnknownModel with the versions that there are.
    """
    word = word.removeprefix(f"{name}@")
    number = CHECKPOINT.fullmatch(word)
    if number is not None or (is_number(word) and len(word) < 10):
        return int(number[1] if number else word)
    cards = service.catalog()
    card = card_of(of_alias(BEST if word == BEST_PERFORMANCE else word, name), cards)
    if card is None or card.name != name:
        there = ", ".join(checkpoint_names(service, name)) or "none"
        raise UnknownModel(f"no version {word[:100]!r} of {name[:100]}; there are {there}")
    return card.version


def checkpoint_names(service: Service, name: str) -> list[str]:
    """Return the versions of `name` in memory as `checkpoint-12`, the oldest first."""
    return [f"checkpoint-{version}" for version in sorted(c.version for c in service.catalog() if c.name == name)]


def _agree(service: Service, model: str, adapter: str) -> bool:
    """Return whether `model` is the base, or means the same as `adapter`, perhaps without its version."""
    if model in (BASE, BASE_MODEL, service.base_name) or plain(model) in (plain(adapter), adapter.partition("@")[0]):
        return True
    cards = service.catalog()
    card = card_of(adapter, cards)
    return card is not None and (model == card.name or card == card_of(model, cards))
