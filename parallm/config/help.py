"""The pages of `--help`: a command, or a group, a key or a recipe in full. Imports no MLX."""

import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from omegaconf import OmegaConf
from pydantic import TypeAdapter
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

from parallm.config.errors import nearest_of
from parallm.config.recipes import Recipe, first_comment, read_recipes
from parallm.config.schema import COMMANDS, PACKAGE_FOLDER, fields_of, known_keys, shipped
from parallm.docstrings import field_docstrings
from parallm.errors import ConfigError

WORDS = {int: "integer", float: "number", str: "text", bool: "true | false", type(None): "null", Any: "any value"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key that holds a value."""

    name: str
    """Dotted name; NAME stands for a name that users choose, [] for an entry of a list."""
    choice: str = ""
    """Name of the environment, for a key of an environment."""
    kind: str
    """Type, such as `integer, 1 or more`."""
    default: str | None
    """Default as on the command line; None for a key that must be given."""
    meaning: str


def keys_of(settings: type, above: str = "", choice: str = "") -> Iterator[Key]:
    """Yield every key of a settings class and of those inside of it, in the order of their definition."""
    for name, field in fields_of(settings).items():
        path = f"{above}.{name}" if above else name
        yield from _keys_of_field(field, path, choice, meaning_of(settings, name))


def meaning_of(settings: type, name: str) -> str:
    """Return the docstring below a field, or below the field that it inherits from, in one line."""
    bases = [base for base in settings.__mro__ if hasattr(base, "__pydantic_fields__") and name in fields_of(base)]
    described = (fields_of(base)[name].description or field_docstrings(base).get(name) for base in bases)
    return " ".join(next(filter(None, described), "").split())


def _keys_of_field(field: FieldInfo, path: str, choice: str, meaning: str) -> Iterator[Key]:
    inside = _settings_in(field.annotation)
    if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1:
        return  # the name of an environment, which is chosen as a whole
    if len(inside) > 1 and "." not in path:
        for name, settings in inside.items():
            yield from keys_of(settings, path, name)
    elif is_pydantic_dataclass(field.annotation):  # type: ignore[arg-type]  # any object may be asked
        yield from keys_of(next(iter(inside.values())), path, choice)
    else:
        kind = describe_type(field.annotation, field.metadata)
        yield Key(name=path, choice=choice, kind=kind, default=_default(field), meaning=meaning)
        if len(inside) == 1:
            place = ".NAME" if get_origin(field.annotation) is dict else "[]"
            yield from keys_of(next(iter(inside.values())), path + place, choice)


def _settings_in(annotation: Any) -> dict[str, type]:
    """Return the settings classes that a type allows or holds, by the name that chooses one of several."""
    if is_pydantic_dataclass(annotation):
        name = fields_of(annotation).get("name")
        values = get_args(name.annotation) if name is not None and get_origin(name.annotation) is Literal else ("",)
        return {str(values[0]): annotation}
    return {name: kind for part in get_args(annotation) for name, kind in _settings_in(part).items()}


def describe_type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the values of a type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe_type(arguments[0], [part for one in arguments[1:] for part in getattr(one, "metadata", [one])])
    if is_pydantic_dataclass(annotation):
        return f"{{{', '.join(fields_of(annotation))}}}"
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, UnionType):
        if len(_settings_in(annotation)) > 1:
            return "the keys of an environment, and its name"
        kinds = [describe_type(part, metadata if part is not type(None) else ()) for part in arguments]
        return " | ".join(dict.fromkeys(kinds))
    if origin is tuple:
        parts = [describe_type(part) for part in arguments if part is not Ellipsis]
        return f"list of {parts[0]}" if Ellipsis in arguments else f"[{', '.join(parts)}]"
    if origin is dict:
        inside = describe_type(arguments[1])
        return "mapping" if inside.startswith(("mapping", "any")) else f"mapping of names to {inside}"
    return ", ".join(filter(None, [WORDS[annotation], _bounds(metadata)]))


def _bounds(metadata: Sequence[Any]) -> str:
    limits = {name: getattr(one, name) for one in metadata for name in ("ge", "gt", "le", "lt") if hasattr(one, name)}
    words = {"ge": "{} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
    if limits.keys() == {"ge", "le"}:
        return f"{limits['ge']} to {limits['le']}"
    return ", ".join(words[name].format(limit) for name, limit in limits.items())


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    value = TypeAdapter(Any).dump_python(field.get_default(call_default_factory=True), mode="json")
    return value if isinstance(value, str) else json.dumps(value)


MAX_WIDTH = 100
"""Maximum number of characters in a line."""
INDENT = " " * 6
USED_MOST: Mapping[str, Sequence[str]] = {
    "train": (
        "name",
        "model.path",
        "model.adapter",
        "rollout.problems_per_step",
        "rollout.group_size",
        "rollout.max_tokens",
        "learner.learning_rate",
        "learner.data",
        "trainer.steps",
        "trainer.evaluate_every",
        "checkpoint.resume",
        "server.port",
    ),
    "serve": (
        "model.path",
        "model.adapter",
        "engine.max_context",
        "server.host",
        "server.port",
        "server.adapters_root",
        "distributed.workers",
    ),
    "evaluate": (
        "model.path",
        "model.adapter",
        "adapters",
        "rollout.max_tokens",
        "trainer.evaluate_problems",
        "trainer.evaluate_samples",
    ),
    "export": ("model.path", "model.adapter", "formats", "output", "quantize.bits"),
    "front": ("workers", "hold_seconds", "server.host", "server.port"),
}
RECIPES = "recipe"


def help_page(command: str, topics: Sequence[str]) -> str:
    """Return the page about each topic, or about the command. Raises ConfigError for unknown topics."""
    pages = {topic: _page_about(command, topic) for topic in topics} if topics else {"": _command_page(command)}
    wrong = [topic for topic, lines in pages.items() if not lines]
    if wrong:
        known = [*_groups(command), *_recipes(command), *(key.name for key in keys_of(COMMANDS[command]))]
        raise ConfigError("\n".join(_unknown(topic, known) for topic in wrong))
    return "\n".join(line for lines in pages.values() for line in [*lines, ""])


def _command_page(command: str) -> list[str]:
    recipes, keys = _recipes(command), {key.name: key for key in keys_of(COMMANDS[command])}
    usage = f"python -m parallm.{command} {'[+recipe=NAME] ' if recipes else ''}[GROUP=CHOICE ...] [KEY=VALUE ...]"
    return [
        usage,
        *_wrapped(_summary(command), "\n  "),
        *(["\nRecipes, with those in ./recipes; --help NAME shows the file:"] if recipes else []),
        *(line for recipe in recipes.values() for line in _recipe_lines(recipe)),
        "\nGroups; --help GROUP explains every key:",
        *(line for group in _groups(command) for line in _group_lines(command, group)),
        "\nKeys that are used most:",
        *(line for name in USED_MOST[command] for line in _key_lines(keys[name])),
        "\nMore:",
        "  -m KEY=A,B           every combination of such values, one job after the other",
        "  --cfg job            print the whole configuration, run nothing",
        "  --help model.path    explain one key",
        "  --version            say what is installed",
    ]


def _page_about(command: str, topic: str) -> list[str]:
    """Return no lines for an unknown topic. Raises ConfigError for a recipe that cannot be read."""
    recipes = _recipes(command)
    if topic in (RECIPES, "recipes"):
        return [line for recipe in recipes.values() for line in _recipe_lines(recipe)]
    if topic in _groups(command):
        return _group_page(command, topic)
    if recipe := recipes.get(topic):
        if recipe.fault:
            raise ConfigError(recipe.fault)
        return [f"# {recipe.path}", *recipe.path.read_text(errors="replace").splitlines()]
    return [line for key in _keys_about(command, topic) for line in _key_lines(key)]


def _keys_about(command: str, topic: str) -> Iterator[Key]:
    """Yield a key, the keys below it, or those of one environment."""
    for key in keys_of(COMMANDS[command]):
        is_of_environment = key.choice and topic in (key.choice, f"environment.{key.choice}")
        if key.name == topic or key.name.startswith((f"{topic}.", f"{topic}[")) or is_of_environment:
            yield key


def _group_page(command: str, group: str) -> list[str]:
    keys, choices = list(_keys_about(command, group)), _choices(command, group)
    lines = [*_wrapped(f"{group}: {meaning_of(COMMANDS[command], group)}"), ""]
    for choice, comment in choices.items():
        lines += _wrapped(f"{group}={choice}{f': {comment}' if comment else ''}", "  ", INDENT)
        lines += [line for key in keys if key.choice == choice for line in _key_lines(key, "    ")]
    lines += [""] if choices else []
    return lines + [line for key in keys if not key.choice for line in _key_lines(key)]


def _group_lines(command: str, group: str) -> list[str]:
    choices = "|".join(_choices(command, group))
    named = f"  {group}={choices}" if choices else f"  {group}"
    return [named, *_wrapped(meaning_of(COMMANDS[command], group), INDENT)]


def _recipe_lines(recipe: Recipe) -> list[str]:
    text = f"BROKEN: {recipe.fault}" if recipe.fault else recipe.summary
    return [f"  +recipe={recipe.name}", *_wrapped(text, INDENT)]


def _key_lines(key: Key, indent: str = "  ") -> list[str]:
    default = "VALUE" if key.default is None else key.default
    kind = f"{key.kind}; must be given" if key.default is None else key.kind
    return [f"{indent}{key.name}={default}  ({kind})", *_wrapped(key.meaning, indent + "    ")]


def _groups(command: str) -> list[str]:
    """Return the parts of a command's configuration."""
    return [name for name in fields_of(COMMANDS[command]) if (PACKAGE_FOLDER / name).is_dir()]


def _choices(command: str, group: str) -> dict[str, str]:
    """Return the choices of a group with their first comments: files whose keys, or whose environment, it knows."""
    known, choices = known_keys(COMMANDS[command])[group], {}
    for file in sorted((shipped("conf") / group).glob("*.yaml")):
        if file.stem in known or OmegaConf.load(file).keys() - {"defaults"} <= known.keys():
            choices[file.stem] = first_comment(file)
    return choices


def _recipes(command: str) -> dict[str, Recipe]:
    return read_recipes() if command == "train" else {}


def _summary(command: str) -> str:
    return first_comment(shipped("conf") / f"{command}.yaml")


def _unknown(topic: str, known: Iterable[str]) -> str:
    return f"--help {topic}: nothing has this name{nearest_of(topic, known)} --help alone shows groups and recipes"


def _wrapped(text: str, indent: str = "", later: str | None = None) -> list[str]:
    width = min(MAX_WIDTH, shutil.get_terminal_size().columns)
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent.lstrip("\n") if later is None else later,
        break_long_words=False,
        break_on_hyphens=False,
    )
