"""Names of models: which adapter version a name means, which one has answered, and the names in `lora_adapter`.

Routes, splits, statistics and the engine gateway ask here. `cards` are the versions in memory.
"""

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from parallm.errors import InvalidRequest, UnknownModel
from parallm.model.adapters.names import is_number, latest_of, of_alias, plain, versioned
from parallm.types import BASE, BEST, LATEST, POLICY, AdapterCard, Completion

CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,9})")
BEST_PERFORMANCE = "best-performance"
BASE_MODEL = "base-model"
"""Name of the base in requests with `lora_adapter`."""


class ServedModels(Protocol):
    """The part of `Service` that names are looked up in."""

    @property
    def catalog(self) -> Callable[[], tuple[AdapterCard, ...]]: ...
    @property
    def policies(self) -> tuple[str, ...]: ...
    @property
    def base_name(self) -> str: ...


def model_names(models: ServedModels) -> list[str]:
    """Return the policies, the base, other adapters (the version that is served), aliases, and every version.

    Policies come first because many clients take the first model of the list.
    """
    cards = models.catalog()
    names = {card.name for card in cards} | {alias for card in cards for alias in card.aliases}
    versions = [versioned(card.name, card.version) for card in cards]
    return [*models.policies, BASE, *sorted(names - set(models.policies)), *versions]


def card_of(model: str, cards: Sequence[AdapterCard]) -> AdapterCard | None:
    """Return the card of the served version of an adapter, of an exact version or of an alias."""
    name = plain(model)
    if newest_of := latest_of(name):
        return max((card for card in cards if card.name == newest_of), key=lambda card: card.version, default=None)
    served = next((card for card in cards if card.name == name and card.is_served), None)
    if served is not None:
        return served
    return next((card for card in cards if name in (versioned(card.name, card.version), *card.aliases)), None)


def resolved(name: str, cards: Sequence[AdapterCard], policies: Sequence[str]) -> str:
    """Return `name@version` for what `name` means now, or `name` itself if it is the base or unknown here.

    `policies` mean the base before their first version.
    """
    card = card_of(name, cards)
    if card is not None:
        return versioned(card.name, card.version)
    adapter = latest_of(plain(name)) or plain(name)
    return versioned(adapter, 0) if adapter in policies else name


def resolved_to(
    name: str, version: int | None, cards: Sequence[AdapterCard], policies: Sequence[str] | None = None
) -> str:
    """Return `name@version` for a request for `name` that `version` answered, although newer versions may exist.

    With `policies`, another name that the base has answered is one of the base's own.
    """
    if name == BASE or version is None:
        return name
    adapter = latest_of(plain(name)) or plain(name)
    if version == 0 and policies is not None and adapter.partition("@")[0] not in policies:
        return name
    is_alias = any(adapter in card.aliases for card in cards)
    return versioned(POLICY if is_alias and "@" not in adapter else adapter.partition("@")[0], version)


def answered_by(
    name: str, completion: Completion, cards: Sequence[AdapterCard], policies: Sequence[str] | None = None
) -> str:
    """Return `name@version` for a request for `name` that ended with `completion`; see `resolved_to`."""
    return resolved_to(name, version_of(completion), cards, policies)


def version_of(completion: Completion) -> int | None:
    """Return the adapter version that sampled the last token."""
    return completion.weight_versions[-1].version if completion.weight_versions else None


def served_policy(models: ServedModels) -> str:
    """Return the policy of requests that name none: the only one, or the first of several."""
    return models.policies[0] if models.policies else BASE


def served_version(models: ServedModels) -> int:
    """Return the version that the bare name of that policy means; 0 for the base."""
    card = card_of(served_policy(models), models.catalog())
    return 0 if card is None else card.version


def model_of(models: ServedModels, lora_adapter: str) -> str:
    """Return the model's name: `checkpoint-12` is version 12 of the policy, `best-performance` its best version.

    Raises InvalidRequest where these could mean several policies.
    """
    if card_of(lora_adapter, models.catalog()) is not None:
        return lora_adapter
    number = CHECKPOINT.fullmatch(lora_adapter)
    if number is None and lora_adapter not in (BEST_PERFORMANCE, LATEST):
        return lora_adapter
    if len(models.policies) > 1:
        raise InvalidRequest(
            f"{lora_adapter} could be one of {', '.join(models.policies)}; name one, such as "
            f"{versioned(models.policies[0], 12)} or {of_alias(BEST, models.policies[0])}",
            "lora_adapter",
        )
    policy = served_policy(models)
    if number is not None:
        return versioned(policy, int(number[1]))
    return of_alias(BEST if lora_adapter == BEST_PERFORMANCE else LATEST, policy)


def version_called(models: ServedModels, name: str, word: str) -> int:
    """Return the version of `name` that `checkpoint-12`, `12`, `best-performance`, `latest` or an alias means.

    Raises UnknownModel with the versions in memory.
    """
    word = word.removeprefix(f"{name}@")
    number = CHECKPOINT.fullmatch(word)
    if number is not None or (is_number(word) and len(word) < 10):
        return int(number[1] if number else word)
    card = card_of(of_alias(BEST if word == BEST_PERFORMANCE else word, name), models.catalog())
    if card is None or card.name != name:
        versions = ", ".join(checkpoint_names(models, name)) or "none"
        raise UnknownModel(f"no version {word[:100]!r} of {name[:100]}; there are {versions}")
    return card.version


def checkpoint_names(models: ServedModels, name: str) -> list[str]:
    """Return the versions of `name` in memory as `checkpoint-12`, the oldest first."""
    return [f"checkpoint-{version}" for version in sorted(c.version for c in models.catalog() if c.name == name)]


def means_the_same(models: ServedModels, model: str, adapter: str) -> bool:
    """Return whether `model` is the base or means the same as `adapter`, perhaps without its version."""
    if model in (BASE, BASE_MODEL, models.base_name) or plain(model) in (plain(adapter), adapter.partition("@")[0]):
        return True
    cards = models.catalog()
    card = card_of(adapter, cards)
    return card is not None and (model == card.name or card == card_of(model, cards))
