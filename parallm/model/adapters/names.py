"""How requests name adapters: `poet` (the served version), `poet@latest` (the newest version), `poet@3`, `poet@best`.

`latest` and `best` alone belong to `policy`. The table and the server's catalog call this; it imports no MLX.
"""

from parallm.errors import AdapterError
from parallm.types import LATEST, POLICY


def plain(model: str) -> str:
    """Return the shortest name of the same model: `best` for `policy@best`, `latest` for `policy@latest`."""
    name, at, ending = model.partition("@")
    return ending if at and name == POLICY and ending and not is_number(ending) else model


def latest_of(model: str) -> str | None:
    """The adapter whose newest version the plain name `model` means: `policy` for `latest`; None for other names."""
    name, _, ending = model.rpartition("@")
    return (name or POLICY) if ending == LATEST else None


def of_alias(alias: str, name: str) -> str:
    """Return the plain name of an adapter's alias."""
    return alias if name == POLICY else f"{name}@{alias}"


def versioned(name: str, version: int) -> str:
    return f"{name}@{version}"


def catalogue_key(name: str) -> str:
    """Return what all spellings of a catalogue's name have in common: small letters, and a tag."""
    tag = "" if ":" in name.rpartition("/")[2] else f":{LATEST}"
    return name.lower() + tag


def check_name(name: str, taken: set[str]) -> None:
    """Raise AdapterError if no adapter or alias can have this name."""
    if not name or "@" in name or is_number(name) or name in taken:
        raise AdapterError(
            f"{name!r} cannot be a name here: it is empty or a number, holds an @ or is one of {sorted(taken)}"
        )


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
