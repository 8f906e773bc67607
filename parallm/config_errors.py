"""What is wrong with a configuration, in one line per key: the key, the value and the choices."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic_core import ErrorDetails

KnownKeys = Mapping[str, Any]
"""Keys as a tree. A choice between classes has one more level: {"environment": {"gsm8k": {"limit": ...}}}."""

UNKNOWN_KEY = {"unexpected_keyword_argument", "extra_forbidden"}
MISSING = {"missing", "missing_argument", "missing_keyword_only_argument"}


def explain_values(errors: Iterable[ErrorDetails], known: KnownKeys) -> str:
    """One line per key for what pydantic found wrong."""
    messages: dict[str, list[str]] = {}
    for error in errors:
        path = _known_part(error, known)
        messages.setdefault(_dotted(path, known), []).append(_explain_value(error, path, known))
    # one value may fail in several ways, one for each type that the key allows
    return "\n".join(f"{key}: {' or '.join(dict.fromkeys(texts))}" for key, texts in messages.items())


def explain_composition(
    error: HydraException | OmegaConfBaseException, arguments: Iterable[str], known: KnownKeys
) -> str:
    """What kept Hydra from composing. `arguments` are the command line's, to name every unknown key at once."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        return f"{group}: '{choice}' is unknown{_choices(choice, error.options or [])}"
    roots = [match[1] for argument in arguments if (match := re.match(r"\+{0,2}(\w+)[^=]*=", argument))]
    unknown = [root for root in dict.fromkeys(roots) if root not in known and root not in {"hydra", "recipe"}]
    if unknown:
        return "\n".join(f"{root}: unknown key{_choices(root, known)}" for root in unknown)
    if "override 'recipe" in str(error):
        return "recipe: a recipe is added to the run, so write +recipe=NAME with the plus"
    lines = (line.strip() for line in str(error).splitlines())
    return " ".join(line for line in lines if line and not line.startswith(("full_key", "object_type", "See http")))


def repeated_keys(arguments: Iterable[str]) -> list[str]:
    """One line for each value of the command line that is a mapping with a key twice: Hydra keeps the last silently."""
    wrong = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        try:
            OmegaConf.create(value if value.startswith("{") else "")
        except yaml.constructor.ConstructorError as error:
            wrong.append(f"{key.lstrip('+')}: {error.problem}")
        except (yaml.YAMLError, OmegaConfBaseException):
            pass  # Hydra's grammar is another one: let it judge
    return wrong


def _known_part(error: ErrorDetails, known: KnownKeys) -> tuple[str, ...]:
    """The error's place without what pydantic appends to it: indices and the type that was tried."""
    path: list[str] = []
    for part in map(str, error["loc"]):
        if not isinstance(known, Mapping) or (part not in known and error["type"] not in UNKNOWN_KEY | MISSING):
            break
        path.append(part)
        known = known.get(part, {})
    return tuple(path)


def _dotted(path: tuple[str, ...], known: KnownKeys) -> str:
    if path and path[0] in _tagged(known):
        path = path[:1] + path[2:]
    return ".".join(path)


def _tagged(known: KnownKeys) -> set[str]:
    return {key for key, choices in known.items() if isinstance(choices, Mapping) and _is_tagged(choices)}


def _is_tagged(choices: Mapping[str, Any]) -> bool:
    return bool(choices) and all(isinstance(keys, Mapping) and keys.get("name") == tag for tag, keys in choices.items())


def _explain_value(error: ErrorDetails, path: tuple[str, ...], known: KnownKeys) -> str:
    deeper = ".".join(map(str, error["loc"][len(path) :]))  # below a key that holds whatever a user puts there
    if error["type"] in UNKNOWN_KEY and deeper:
        return f"{deeper}: unknown key"
    if error["type"] in MISSING and deeper:
        return f"{deeper} must be given"
    if error["type"] in UNKNOWN_KEY:
        siblings = known
        for part in path[:-1]:
            siblings = siblings[part]
        return f"unknown key{_choices(path[-1], siblings)}"
    if error["type"] in MISSING:
        return "must be given"
    if error["type"] == "union_tag_invalid":
        tag, tags = error["ctx"]["tag"], error["ctx"]["expected_tags"].replace("'", "").split(", ")
        return f"name '{tag}' is unknown{_choices(tag, tags)}"
    if error["type"] == "value_error" and isinstance(error["input"], Mapping):
        return error["msg"].removeprefix("Value error, ")  # about several keys of a part, which it names
    place = f"{deeper.removesuffix('.[key]')}: " if deeper and path == ("policies",) else ""
    return f"{place}{error['input']!r} {re.sub(r'^(Input|String|Value error,) (should )?', 'must ', error['msg'])}"


def _choices(wrong: str, choices: Iterable[str]) -> str:
    names = list(choices)
    nearest = difflib.get_close_matches(wrong, names, n=1)
    suggestion = f", did you mean {nearest[0]}?" if nearest else ";"
    return f"{suggestion} choices: {', '.join(names)}"
