"""The pages of `--help`: a command, or a group, a key or a recipe in full. Imports no MLX."""

import difflib
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from parallm.config import COMMANDS, PACKAGE_FOLDER, known_keys, shipped
from parallm.errors import ConfigError
from parallm.key_meanings import Key, fields_of, keys_of, meaning_of
from parallm.recipe_files import Recipe, first_comment, read_recipes

WIDEST = 100
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
}
RECIPES = "recipe"


def overview() -> str:
    """Return the page with all commands."""
    lines = ["ParaLLM serves a language model and trains it while it serves.\n"]
    for name in COMMANDS:
        lines += [f"  python -m parallm.{name}", *_wrapped(_summary(name), INDENT)]
    return "\n".join([*lines, "\nEach of them answers to --help, and --version says what is installed.", ""])


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
    if topic in recipes:
        return _recipe_page(recipes[topic])
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


def _recipe_page(recipe: Recipe) -> list[str]:
    if recipe.fault:
        raise ConfigError(recipe.fault)
    return [f"# {recipe.path}", *recipe.path.read_text(errors="replace").splitlines()]


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
    """Return the choices of a group with their first comments; none if there is nothing to choose."""
    known = known_keys(COMMANDS[command])[group]
    files = [path for path in sorted((shipped("conf") / group).glob("*.yaml")) if _fits(path, known)]
    return {path.stem: first_comment(path) for path in files}


def _fits(path: Path, known: Mapping[str, Any]) -> bool:
    """Whether all keys of a file are known; keys of an environment are known by its name."""
    keys = OmegaConf.load(path).keys() - {"defaults"}
    return keys <= known.keys() or path.stem in known


def _recipes(command: str) -> dict[str, Recipe]:
    return read_recipes() if command == "train" else {}


def _summary(command: str) -> str:
    return first_comment(shipped("conf") / f"{command}.yaml")


def _unknown(topic: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(topic, known, n=1)
    suggestion = f", did you mean {nearest[0]}?" if nearest else ";"
    return f"--help {topic}: nothing has this name{suggestion} --help alone shows groups and recipes"


def _wrapped(text: str, indent: str = "", later: str | None = None) -> list[str]:
    width = min(WIDEST, shutil.get_terminal_size().columns)
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent.lstrip("\n") if later is None else later,
        break_long_words=False,
        break_on_hyphens=False,
    )
