"""From `package.module:Class` to an environment of one's own. Knows no other."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from parallm.environment.settings import CustomSettings
from parallm.errors import ConfigError

MEMBERS = ("problems", "score", "weights")


def make_custom(settings: CustomSettings) -> Any:
    """Import `module:Class` and call it with the options. Raises ConfigError, saying which of the steps failed."""
    target = settings.target
    module_name, colon, class_name = target.partition(":")
    if not (module_name and colon and class_name):
        raise ConfigError(f"environment.target={target!r} must have the form package.module:Class")
    module = import_module(module_name, f"environment.target={target!r}")
    maker = getattr(module, class_name, None)
    if not callable(maker):
        classes = sorted(name for name, value in vars(module).items() if inspect.isclass(value))
        raise ConfigError(f"environment.target={target!r}: {module_name} has no class {class_name}, it has {classes}")
    made = call_with_options(maker, settings.options, target)
    missing = [member for member in MEMBERS if not hasattr(made, member)]
    if missing:
        raise ConfigError(
            f"environment.target={target!r} lacks {', '.join(missing)}; parallm/environment/README.md shows an example"
        )
    return made


def import_module(name: str, setting: str) -> ModuleType:
    """Import `name`; an import that fails inside the module is told apart from a module that is not there.

    `setting` begins the message of the ConfigError, as in `environment.target='mine:Maze'`.
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


def call_with_options(maker: Callable[..., Any], options: Mapping[str, Any], target: str) -> Any:
    """Call `maker(**options)`; raises ConfigError naming the signature if the options do not fit it."""
    signature = inspect.signature(maker)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"environment.options={dict(options)} do not fit {target}{signature}: {error}; change environment.options"
        ) from error
    return maker(**options)
