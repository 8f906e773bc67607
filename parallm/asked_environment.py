"""Whether the command line, or its recipe, names an environment."""

from collections.abc import Iterable, Mapping
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

ENVIRONMENT = "environment"
KEY = "trainer.evaluate_on"


def with_asked_environment(composed: DictConfig) -> DictConfig:
    """Replace trainer.evaluate_on=auto by `environment` in Hydra's present composition, if the user names one.

    Reward models write no text and are never evaluated on an environment.
    """
    is_of_policy = OmegaConf.select(composed, "learner.trains") == "policy"
    if is_of_policy and OmegaConf.select(composed, KEY) == "auto" and _is_asked():
        OmegaConf.update(composed, KEY, ENVIRONMENT)
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
