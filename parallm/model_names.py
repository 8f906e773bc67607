"""How requests name adapters: `poet` and `poet@latest` (its newest version), `poet@3`, `poet@best` (an alias).

What stands alone is about `policy`: `latest`, `best`.
"""

from parallm.types import LATEST, POLICY


def plain(model: str) -> str:
    """The shortest name for the same: `policy` for `latest`, `best` for `policy@best`, `poet` for `poet@latest`."""
    name, at, ending = model.partition("@")
    if model == LATEST or (at and ending == LATEST):
        return name if at else POLICY
    return ending if at and name == POLICY and ending and not is_number(ending) else model


def of_alias(alias: str, name: str) -> str:
    """The plain name of the alias of an adapter."""
    return alias if name == POLICY else f"{name}@{alias}"


def versioned(name: str, version: int) -> str:
    return f"{name}@{version}"


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
