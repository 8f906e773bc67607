"""Loads an environment of the package `verifiers` by its id, of either of its two kinds.

Called by `build_environment`. The module of a kind is imported when it is needed, since each fits other versions.
"""

import importlib
import importlib.metadata
import importlib.util
from functools import partial
from types import ModuleType

from parallm.environment.settings import VerifiersSettings
from parallm.errors import ConfigError
from parallm.integrations.verifiers.environment import VerifiersEnvironment

SHIPPED = "verifiers.v1.tasksets"
INSTALL = "pip install 'parallm[verifiers]'"


def load_verifiers(settings: VerifiersSettings) -> VerifiersEnvironment:
    """Make the environment that `settings` names. Raises ConfigError for a package that is missing or does not fit."""
    version = installed_version()
    module = environment_module(settings.id)
    if not hasattr(module, "load_environment"):
        if version < (0, 4):
            raise ConfigError(
                f"environment.id={settings.id!r} has no load_environment; tasksets, the newer kind of environments, "
                f"need verifiers 0.4, and {importlib.metadata.version('verifiers')} is installed: {INSTALL}"
            )
        kind = importlib.import_module("parallm.integrations.verifiers.taskset").TasksetSource
        return VerifiersEnvironment(settings, partial(kind, settings.id))
    if version >= (0, 4):
        raise ConfigError(
            f"environment.id={settings.id!r} is of the kind with load_environment, which verifiers "
            f"{importlib.metadata.version('verifiers')} does not have any more: pip install 'verifiers>=0.3.1,<0.4'"
        )
    kind = importlib.import_module("parallm.integrations.verifiers.classic").ClassicSource
    return VerifiersEnvironment(settings, partial(kind, settings.id))


def installed_version() -> tuple[int, ...]:
    """The package's major and minor version. Raises ConfigError without the package."""
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"environment=verifiers needs the package verifiers: {INSTALL}") from error
    return tuple(int(part) for part in version.split(".")[:2])


def environment_module(environment_id: str) -> ModuleType:
    """Import the module of an id such as `owner/some-name@1.0`, as the package does. Raises ConfigError."""
    name = environment_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    try:
        return importlib.import_module(f"{SHIPPED}.{name}" if is_shipped(name) else name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise ConfigError(
                f"environment.id={environment_id!r}: no module {name} is installed; install the environment's package "
                "(`prime env install OWNER/NAME`, or pip install its folder), or add its folder to PYTHONPATH"
            ) from error
        raise ConfigError(f"environment.id={environment_id!r} cannot be imported: {error}") from error


def is_shipped(name: str) -> bool:
    """Whether the package brings the taskset."""
    try:
        return importlib.util.find_spec(f"{SHIPPED}.{name}") is not None
    except ModuleNotFoundError:
        return False
