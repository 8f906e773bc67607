"""The folders of a user where a server and its clients meet: for its socket, log, catalogue and configuration."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

CONFIG_VARIABLE = "PARALLM_CONFIG"
"""Environment variable: another configuration file, or `off`."""
OFF = "off"
NAME, MAC_NAME = "parallm", "ParaLLM"
IS_MAC = sys.platform == "darwin"


def default_socket(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the unix socket of `server.uds=auto`, where `parallm` looks for a server."""
    if IS_MAC:
        return _home(environment) / "Library/Application Support" / MAC_NAME / "run/parallm.sock"
    if folder := environment.get("XDG_RUNTIME_DIR"):
        return Path(folder) / NAME / "parallm.sock"
    return state_folder(environment) / "run/parallm.sock"


def state_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of logs, and of the lock that starts a server once."""
    if IS_MAC:
        return _home(environment) / "Library/Logs" / MAC_NAME
    folder = environment.get("XDG_STATE_HOME")
    return (Path(folder) if folder else _home(environment) / ".local/state") / NAME


def data_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of what a server keeps for its user, such as its catalogue."""
    if IS_MAC:
        return _home(environment) / "Library/Application Support" / MAC_NAME
    folder = environment.get("XDG_DATA_HOME")
    return (Path(folder) if folder else _home(environment) / ".local/share") / NAME


def config_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of the user's configuration file, which need not exist; None where it is switched off."""
    given = environment.get(CONFIG_VARIABLE)
    if given == OFF:
        return None
    if given:
        return Path(given).expanduser()
    if IS_MAC:
        return _home(environment) / "Library/Application Support" / MAC_NAME / "config.yaml"
    folder = environment.get("XDG_CONFIG_HOME")
    return (Path(folder) if folder else _home(environment) / ".config") / NAME / "config.yaml"


def _home(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("HOME") or Path.home())
