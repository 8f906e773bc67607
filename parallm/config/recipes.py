"""Recipes: files with the changes of a run, chosen by `+recipe=NAME`. A broken one fails only the runs that name it."""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallm.config.errors import choices_for
from parallm.config.schema import shipped
from parallm.errors import ConfigError

GROUP = "recipe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A file of recipes/."""

    name: str
    path: Path
    values: DictConfig | None
    """None if the file cannot be read."""
    fault: str = ""
    """Reason why the file cannot be read, in one line."""

    @property
    def summary(self) -> str:
        """The first sentence of the file's first comment."""
        return re.split(r"(?<=[.!?])\s", first_comment(self.path), maxsplit=1)[0]


def read_recipes(*folders: Path) -> dict[str, Recipe]:
    """Return the recipes of the package and of `./recipes`, or of the given folders, by name; later folders win."""
    folders = folders or (shipped("recipes"), Path("recipes"))
    paths = {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
    return {name: _read(path) for name, path in paths.items()}


def first_comment(path: Path) -> str:
    """Return the comment at the beginning of a file, in one line."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(errors="replace").splitlines())
    return " ".join(line.lstrip("# ").rstrip() for line in lines)


def register_recipes(recipes: Iterable[Recipe]) -> None:
    """Make each readable recipe selectable as `+recipe=NAME`."""
    for recipe in recipes:
        if recipe.values is not None:
            ConfigStore.instance().store(
                group=GROUP,
                name=recipe.name,
                node=recipe.values,
                package="_global_",
                provider=str(recipe.path.parent),
            )


def check_asked(arguments: Iterable[str], recipes: dict[str, Recipe]) -> None:
    """Raise ConfigError with one line for each recipe of the command line that is unknown or cannot be read."""
    named = [value for key, _, value in (argument.partition("=") for argument in arguments) if key == f"+{GROUP}"]
    asked = [name.strip() for names in named for name in names.split(",")]
    unknown = [name for name in asked if name not in recipes and re.fullmatch(r"[\w.-]+", name)]
    wrong = [f"recipe: '{name}' is unknown{choices_for(name, recipes)}" for name in unknown]
    wrong += [recipes[name].fault for name in asked if name in recipes and recipes[name].fault]
    if wrong:
        raise ConfigError("\n".join(wrong))


def _read(path: Path) -> Recipe:
    values, fault = None, f"recipe {path} must be a mapping of keys to values"
    try:
        values = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        fault = f"recipe {path} cannot be read: {_reason(error)}"
    if isinstance(values, DictConfig):
        return Recipe(name=path.stem, path=path, values=values)
    return Recipe(name=path.stem, path=path, values=None, fault=fault)


def _reason(error: Exception) -> str:
    """Return what is wrong and where, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return " ".join(str(error).split())
