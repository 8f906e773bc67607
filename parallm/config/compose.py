"""Composes the configuration of a command from overrides, for the command line and for Python. Imports no MLX."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from parallm.config.command_line import check_words
from parallm.config.errors import explain_composition
from parallm.config.recipes import check_asked, read_recipes, register_recipes
from parallm.config.run_folder import export_folder, run_folder
from parallm.config.schema import keys_elsewhere, known_keys, register_defaults, shipped, to_config
from parallm.errors import ConfigError

ENVIRONMENT, EVALUATE_ON = "environment", "trainer.evaluate_on"
Config = TypeVar("Config")

TRAIN = "train"
"""The command that takes recipes and keeps a log in its folder."""


def with_asked_environment(composed: DictConfig) -> DictConfig:
    """Replace trainer.evaluate_on=auto by `environment` in Hydra's present composition, if the user names one.

    Reward models write no text and are never evaluated on an environment.
    """
    is_of_policy = OmegaConf.select(composed, "learner.trains") == "policy"
    if is_of_policy and OmegaConf.select(composed, EVALUATE_ON) == "auto" and _is_asked():
        OmegaConf.update(composed, EVALUATE_ON, ENVIRONMENT)
    return composed


def names_environment(overrides: Iterable[str], recipe: Mapping[str, Any]) -> bool:
    """Whether an override of the command line, or a recipe as it stands in its file, names the environment."""
    keys = [override.partition("=")[0].lstrip("+~").partition("@")[0] for override in overrides]
    groups = [str(key) for entry in recipe.get("defaults", ()) if isinstance(entry, Mapping) for key in entry]
    named = [*keys, *map(str, recipe), *(group.removeprefix("override").strip().lstrip("/") for group in groups)]
    return any(name.partition(".")[0] == ENVIRONMENT for name in named)


def _is_asked() -> bool:
    hydra = HydraConfig.get()
    recipe = hydra.runtime.choices.get("recipe")
    stored = {} if recipe is None else ConfigStore.instance().load(f"recipe/{recipe}.yaml").node
    return names_environment(hydra.overrides.task, {} if stored is None else stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed(Generic[Config]):
    config: Config
    values: DictConfig
    """The values before validation, as config.yaml keeps them."""
    folder: Path
    """The run folder of this configuration."""


def register(name: str, kind: type, arguments: Sequence[str]) -> None:
    """Register defaults and recipes of the command `name` with Hydra. Raises ConfigError for wrong arguments."""
    recipes = read_recipes() if name == TRAIN else None
    check_words(arguments, known_keys(kind), recipes)
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)
    OmegaConf.register_new_resolver("export_folder", export_folder, replace=True)
    register_defaults(kind)
    if recipes is not None:
        check_asked(arguments, recipes)
        register_recipes(recipes.values())


def compose(
    name: str, kind: type[Config], overrides: Sequence[str], given: Mapping[str, object] | None = None
) -> Composed[Config]:
    """Compose conf/`name`.yaml with `overrides` as the command does, in a process that may use Hydra for itself.

    `given` are values by dotted keys, which `overrides` must leave out. Raises ConfigError.
    """
    given, overrides = given or {}, listed(overrides)
    _check_overrides(overrides, given)
    register(name, kind, overrides)
    try:
        with _own_hydra(name):
            whole = hydra.compose(config_name=name, overrides=overrides, return_hydra_config=True)
            for key, value in given.items():
                OmegaConf.update(whole, key, value)
            HydraConfig.instance().set_config(whole)
            with_asked_environment(whole)
            folder = Path(whole.hydra.run.dir)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain_composition(error, overrides, known_keys(kind), keys_elsewhere(kind))) from error
    with open_dict(whole):
        del whole["hydra"]
    return Composed(config=to_config(whole, kind), values=whole, folder=folder)


def listed(overrides: object) -> list[str]:
    """Return overrides that a program gives as a list. Raises ConfigError for a text, a mapping and the like."""
    if isinstance(overrides, Sequence) and not isinstance(overrides, str):
        texts = [override for override in overrides if isinstance(override, str)]
        if len(texts) == len(overrides):
            return texts
    raise ConfigError(f"overrides is {overrides!r} and must be a list of texts such as ['trainer.steps=20']")


def _check_overrides(overrides: Sequence[str], given: Mapping[str, object]) -> None:
    for override in overrides:
        if override.startswith("-"):
            raise ConfigError(f"{override}: an option of the command line; overrides are keys with values")
        key = override.partition("=")[0].lstrip("+~")
        if key in given:
            raise ConfigError(f"{key} is given twice, as an argument and in overrides; leave one of them out")


@contextmanager
def _own_hydra(name: str) -> Iterator[None]:
    """Use Hydra without disturbing a program's own: its hydra.main, or a notebook's."""
    present, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    try:
        folder = str(shipped("conf").resolve())
        with hydra.initialize_config_dir(folder, job_name=f"parallm-{name}", version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = present
        HydraConfig.instance().cfg = config
