"""Messages about a wrong configuration, one line per key: the key, the value and the choices."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException
from pydantic_core import ErrorDetails

KnownKeys = Mapping[str, Any]
"""Tree of keys. A choice between classes has one more level: {"environment": {"gsm8k": {"limit": ...}}}."""

UNKNOWN_KEY = {"unexpected_keyword_argument", "extra_forbidden"}
RENAMED = {
    "engine.serving_share": "device.serving_share",
    "learner.engine_share": "device.engine_share",
    "metrics.wandb_project": "metrics.project",
}
MISSING = {"missing", "missing_argument", "missing_keyword_only_argument"}


def explain_values(
    errors: Iterable[ErrorDetails], known: KnownKeys, elsewhere: Mapping[str, KnownKeys] = MappingProxyType({})
) -> str:
    """Return one line per key for pydantic's errors. `elsewhere` has the keys of other commands by their names."""
    messages: dict[str, list[str]] = {}
    for error in errors:
        path = _known_part(error, known)
        key = _dotted(path, known)
        is_unknown = error["type"] in UNKNOWN_KEY and not _holds(known, key.split("."))
        owners = _owners(key, elsewhere) if is_unknown else ""
        renamed = f"renamed, set {RENAMED[key]}" if key in RENAMED else ""
        messages.setdefault(key, []).append(renamed or owners or _explain_value(error, path, known))
    # one value may fail in several ways, one for each type that the key allows
    return "\n".join(f"{key}: {' or '.join(dict.fromkeys(texts))}" for key, texts in messages.items())


def explain_composition(
    error: HydraException | OmegaConfBaseException,
    arguments: Iterable[str],
    known: KnownKeys,
    elsewhere: Mapping[str, KnownKeys],
) -> str:
    """Return why Hydra could not compose. `arguments` are the command line's, to name every unknown key at once."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        return f"{group}: '{choice}' is unknown{choices_for(choice, error.options or [])}"
    keys = [match[1] for argument in arguments if (match := re.match(r"\+{0,2}(\w[\w.]*)[^=]*=", argument))]
    unknown = [key for key in dict.fromkeys(keys) if key.partition(".")[0] not in {*known, "hydra", "recipe"}]
    if unknown:
        return "\n".join(_explain_key(key, known, elsewhere) for key in unknown)
    if "override 'recipe" in str(error):
        return "recipe: a recipe is added to the run, so write +recipe=NAME with the plus"
    if match := re.match(r"Could not override '(\w+)'", str(error)):
        return f"{match[1]}: this command has no choices of it; set its keys, which --help {match[1]} shows"
    lines = (line.strip() for line in str(error).splitlines())
    return " ".join(line for line in lines if line and not line.startswith(("full_key", "object_type", "See http")))


def _known_part(error: ErrorDetails, known: KnownKeys) -> tuple[str, ...]:
    """Return the error's key without the indices and types that pydantic appends."""
    path: list[str] = []
    for part in map(str, error["loc"]):
        if not isinstance(known, Mapping) or (part not in known and error["type"] not in UNKNOWN_KEY | MISSING):
            break
        path.append(part)
        known = known.get(part, {})
    return tuple(path)


def _dotted(path: tuple[str, ...], known: KnownKeys) -> str:
    if path and _is_tagged(known.get(path[0])):
        path = path[:1] + path[2:]
    return ".".join(path)


def _is_tagged(choices: Any) -> bool:
    """Whether these are the keys of a choice between classes, by their names."""
    if not isinstance(choices, Mapping):
        return False
    return bool(choices) and all(isinstance(keys, Mapping) and keys.get("name") == tag for tag, keys in choices.items())


def _explain_value(error: ErrorDetails, path: tuple[str, ...], known: KnownKeys) -> str:
    deeper = ".".join(map(str, error["loc"][len(path) :]))  # below a key that holds any value
    if error["type"] in UNKNOWN_KEY and deeper:
        return f"{deeper}: unknown key"
    if error["type"] in MISSING and deeper:
        return f"{deeper} must be given"
    if error["type"] in UNKNOWN_KEY:
        siblings = known
        for part in path[:-1]:
            siblings = siblings[part]
        return f"unknown key{choices_for(path[-1], siblings)}"
    if error["type"] in MISSING:
        return "must be given"
    if error["type"] == "union_tag_invalid":
        tag, tags = error["ctx"]["tag"], error["ctx"]["expected_tags"].replace("'", "").split(", ")
        return f"name '{tag}' is unknown{choices_for(tag, tags)}"
    if error["type"] == "value_error" and isinstance(error["input"], Mapping):
        return error["msg"].removeprefix("Value error, ")  # about several keys of a part
    place = f"{deeper.removesuffix('.[key]')}: " if deeper and path == ("policies",) else ""
    return f"{place}{error['input']!r} {re.sub(r'^(Input|String|Value error,) (should )?', 'must ', error['msg'])}"


def _explain_key(key: str, known: KnownKeys, elsewhere: Mapping[str, KnownKeys]) -> str:
    """Describe a key whose part this command does not have."""
    if key in RENAMED:
        return f"{key}: renamed, set {RENAMED[key]}"
    if owners := _owners(key, elsewhere):
        return f"{key}: {owners}"
    part = key.partition(".")[0]
    return f"{part}: unknown key{choices_for(part, known)}"


def _owners(key: str, elsewhere: Mapping[str, KnownKeys]) -> str:
    """Name the other commands that have a key; empty if none has it."""
    owners = [command for command, keys in elsewhere.items() if _holds(keys, key.split("."))]
    *others, last = owners or [""]
    named = f"{', '.join(others)} and {last}" if others else last
    return f"belongs to {named}; this command does not use it" if owners else ""


def _holds(keys: Any, path: Sequence[str]) -> bool:
    """Whether a key of that path exists; for a choice between classes, in one of them."""
    if not path:
        return True
    if not isinstance(keys, Mapping):
        return False
    if _is_tagged(keys):
        return any(_holds(choice, path) for choice in keys.values())
    return path[0] in keys and _holds(keys[path[0]], path[1:])


def choices_for(wrong: str, choices: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, and all of them."""
    names = list(choices)
    return f"{nearest_of(wrong, names)} choices: {', '.join(names)}"


def nearest_of(wrong: str, names: Iterable[str]) -> str:
    """Return the middle of a message about an unknown name: the nearest known one, if there is one."""
    nearest = difflib.get_close_matches(wrong, names, n=1)
    return f", did you mean {nearest[0]}?" if nearest else ";"
