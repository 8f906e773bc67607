"""Environments of the user's own, from `package.module:Class`. Called by `build_environment`."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from parallm.environment.settings import CustomSettings
from parallm.errors import ConfigError

MEMBERS = ("problems", "score", "weights")


def make_custom(settings: CustomSettings) -> Any:
    """Import `module:Class` and call it with the options. Raises ConfigError that names the step that failed."""
    target = settings.target
    module_name, colon, class_name = target.partition(":")
    if not (module_name and colon and class_name):
        raise ConfigError(f"environment.target={target!r} must have the form package.module:Class")
    module = import_module(module_name, f"environment.target={target!r}")
    factory = getattr(module, class_name, None)
    if not callable(factory):
        classes = sorted(name for name, value in vars(module).items() if inspect.isclass(value))
        raise ConfigError(f"environment.target={target!r}: {module_name} has no class {class_name}, it has {classes}")
    environment = call_with_options(factory, settings.options, target)
    missing = [member for member in MEMBERS if not hasattr(environment, member)]
    if missing:
        raise ConfigError(
            f"environment.target={target!r} lacks {', '.join(missing)}; parallm/environment/README.md shows an example"
        )
    return environment


def import_module(name: str, setting: str) -> ModuleType:
    """Import `name`. Raises ConfigError that tells a module that is not there from an import that fails inside it.

    `setting` begins the message, as in `environment.target='mine:Maze'`.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"{setting}: there is no module {error.name}; start `python -m parallm.train` "
                "in the folder that holds it, or add that folder to PYTHONPATH"
            ) from error
        raise ConfigError(f"{setting}: {name} needs a missing module: {error}") from error
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{setting} cannot be imported: {error}") from error


def call_with_options(factory: Callable[..., Any], options: Mapping[str, Any], target: str) -> Any:
    """Call `factory(**options)`. Raises ConfigError that names the signature if the options do not fit it."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"environment.options={dict(options)} do not fit {target}{signature}: {error}; change environment.options"
        ) from error
    return factory(**options)
