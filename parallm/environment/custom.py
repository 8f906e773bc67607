"""Environments of the user's own, from `package.module:Class`. Called by `build_environment`."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any, Literal

from parallm.environment.settings import CustomSettings
from parallm.errors import ConfigError

MEMBERS = ("problems", "score", "weights")


def make_custom(settings: CustomSettings) -> Any:
    """Import `module:Class` and call it with the options. Raises ConfigError that names the step that failed."""
    target = settings.target
    setting = f"environment.target={target!r}"
    factory = import_callable(target, setting, "Class")
    signature = inspect.signature(factory)
    try:
        signature.bind(**settings.options)
    except TypeError as error:
        raise ConfigError(
            f"environment.options={settings.options} do not fit {target}{signature}: {error}; change "
            "environment.options"
        ) from error
    environment = factory(**settings.options)
    missing = [member for member in MEMBERS if not hasattr(environment, member)]
    if missing:
        raise ConfigError(f"{setting} lacks {', '.join(missing)}; parallm/environment/README.md shows an example")
    return environment


def import_callable(target: str, setting: str, kind: Literal["Class", "function"]) -> Callable[..., Any]:
    """Import `package.module:Class` or `package.module:function`.

    Raises ConfigError that tells what is not there from an import that fails inside it. `setting` begins the message,
    as in `environment.target='mine:Maze'`.
    """
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{setting} must have the form package.module:{kind}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{setting}: there is no module {error.name}; start `python -m parallm.train` "
                "in the folder that holds it, or add that folder to PYTHONPATH"
            ) from error
        raise ConfigError(f"{setting}: {module_name} needs a missing module: {error}") from error
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{setting} cannot be imported: {error}") from error
    found: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(found):
        is_kind = inspect.isclass if kind == "Class" else inspect.isfunction
        others = sorted(other for other, value in vars(module).items() if is_kind(value))
        raise ConfigError(f"{setting}: {module_name} has no {kind.lower()} {name}, it has {others}")
    return found
