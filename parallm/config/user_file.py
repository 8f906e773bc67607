"""The user's configuration file: keys of any command, taken as if they stood first on its command line.

The order is: defaults, files of conf/, this file, a recipe, the command line. What the command line or the recipe says
of a key or of its whole group counts alone. Imports no MLX.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallm.config.compose import TRAIN
from parallm.config.errors import KnownKeys, choices_for
from parallm.config.recipes import read_recipes
from parallm.config.schema import COMMANDS, known_keys
from parallm.distributed.identity import REPLICA
from parallm.errors import ConfigError
from parallm.user_folders import CONFIG_VARIABLE, OFF, config_file

WORKER = ("MLX_RANK", REPLICA)
"""Variables of processes whose starter has read the file for them."""
CHOSEN = "environment"
"""Group whose keys depend on its choice, which belongs to a recipe or the command line."""


def with_user_file(command: str, arguments: Sequence[str]) -> list[str]:
    """Return the arguments behind those of the user's file, which is named on standard error if it adds any.

    Child processes get them as arguments and read no file. Raises ConfigError for a file with unknown keys.
    """
    if any(name in os.environ for name in WORKER):
        return list(arguments)
    path = config_file()
    added = overrides_of(command, arguments)
    os.environ[CONFIG_VARIABLE] = OFF
    if added:
        sys.stderr.write(f"parallm: {path} sets {' '.join(added)}\n")
    return [*added, *arguments]


def overrides_of(command: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return what the user's file adds to these arguments. Raises ConfigError."""
    path = config_file()
    if path is None or not _is_there(path):
        return []
    known, taken = known_keys(COMMANDS[command]), [*_asked_keys(arguments), *_recipe_keys(command, arguments)]
    return [
        f"{key}={_literal(value, f'{path}: {key}')}"
        for key, value in read_user_file(path).items()
        if _is_known(known, key) and not any(_is_part(key, other) or _is_part(other, key) for other in taken)
    ]


def read_user_file(path: Path) -> dict[str, Any]:
    """Return the values by dotted keys. Raises ConfigError with a line for each key that no command has."""
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} should hold keys with values, such as `server: {{port: 9000}}`")
    known = _merged(known_keys(kind) for kind in COMMANDS.values())
    found, wrong = dict(_leaves(values, known)), list(_unknown(values, known))
    if wrong:
        raise ConfigError("\n".join(f"{path}: {line}" for line in wrong))
    return found


def _is_there(path: Path) -> bool:
    if not path.exists() and os.environ.get(CONFIG_VARIABLE):
        raise ConfigError(f"{CONFIG_VARIABLE}={path} does not exist; name a file, or {CONFIG_VARIABLE}={OFF}")
    return path.exists()


def _merged(trees: Iterable[KnownKeys]) -> dict[str, Any]:
    """Return the keys of all trees."""
    merged: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            below = merged.get(key)
            merged[key] = (
                _merged((below, value)) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
            )
    return merged


def _leaves(values: Mapping[Any, Any], known: KnownKeys, above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(known.get(key), Mapping) and known[key]:
            yield from _leaves(value, known[key], f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _unknown(values: Mapping[Any, Any], known: KnownKeys, above: str = "") -> Iterator[str]:
    for key, value in values.items():
        below = known.get(key)
        if key not in known:
            yield f"{above}{key}: unknown key{choices_for(str(key), known)}"
        elif f"{above}{key}" == CHOSEN:
            yield f"{CHOSEN}: an environment is chosen by a recipe or on the command line"
        elif isinstance(below, Mapping) and below and isinstance(value, Mapping):
            yield from _unknown(value, below, f"{above}{key}.")
        elif isinstance(below, Mapping) and below:
            yield f"{above}{key}: {value!r} should be keys with values; a choice such as {key}={value} is for commands"


def _is_known(known: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(known, Mapping) or part not in known:
            return False
        known = known[part]
    return True


def _is_part(key: str, other: str) -> bool:
    """Whether `key` is `other` or lies below it."""
    return key == other or key.startswith(f"{other}.")


def _asked_keys(arguments: Iterable[str]) -> list[str]:
    """Return the keys and groups that the command line names."""
    return [word.partition("=")[0].lstrip("+~").partition("@")[0] for word in arguments if not word.startswith("-")]


def _recipe_keys(command: str, arguments: Sequence[str]) -> Iterator[str]:
    """Yield the keys and groups that the chosen recipe names."""
    names = [word.removeprefix("+recipe=") for word in arguments if word.startswith("+recipe=")]
    recipes = read_recipes() if names and command == TRAIN else {}
    for recipe in (recipes[name] for name in names if name in recipes):
        values = {} if recipe.values is None else OmegaConf.to_container(recipe.values, resolve=False)
        assert isinstance(values, Mapping), "read_recipes checks that"
        for entry in values.get("defaults", ()):
            if isinstance(entry, Mapping):
                yield from (str(group).removeprefix("override").strip().lstrip("/") for group in entry)
        yield from _paths({key: value for key, value in values.items() if key != "defaults"})


def _paths(values: Mapping[Any, Any], above: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


def _literal(value: Any, where: str) -> str:
    """Return a value in the words of a command line."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return QuotedString(value, Quote.single).with_quotes()
        case list():
            return f"[{','.join(_literal(one, where) for one in value)}]"
        case Mapping():
            if wrong := [key for key in value if not re.fullmatch(r"[A-Za-z0-9_./-]+", str(key))]:
                raise ConfigError(f"{where}: the name {wrong[0]!r} cannot stand here; set it as an argument")
            return f"{{{','.join(f'{key}:{_literal(one, where)}' for key, one in value.items())}}}"
        case _:
            raise ConfigError(f"{where}: {value!r} is no text, number, true, false, null, list or mapping")
