"""`lora_adapter`: the adapter that answers, beside a `model` that names the base."""

import re
from typing import TypeVar

from parallm.errors import InvalidRequest, UnknownModel
from parallm.model_names import is_number, of_alias, plain, versioned
from parallm.server.catalog import card_of, served_policy
from parallm.server.schemas import GenerationBody
from parallm.server.service import Service
from parallm.types import BASE, BEST, LATEST

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
