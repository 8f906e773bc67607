"""`parallm service`: the units of a server for systemd or launchd, written, removed, started and watched."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from parallm.cli.connection import CommandFailed, command
from parallm.cli.units import LABEL, MARK, Served, launchd_agent, systemd_service, systemd_socket
from parallm.config.compose import compose
from parallm.config.schema import ServeConfig
from parallm.config.user_file import overrides_of
from parallm.errors import ConfigError
from parallm.user_folders import IS_MAC, state_folder

INHERITED = ("PATH", "HF_HOME", "HF_HUB_OFFLINE")
"""Variables that launchd does not give to its agents."""
SERVICE, SOCKET = "parallm.service", "parallm.socket"


@command
def service(arguments: Namespace) -> int:
    """Write or remove units, or let the service manager start, stop and show the server."""
    if arguments.action == "install":
        files = _files(arguments)
        if arguments.print:
            for path, content in files.items():
                sys.stdout.write(f"# {path}\n{content.decode()}\n")
            return 0
        for path, content in files.items():
            _write(path, content)
        sys.stdout.write(f"now start it: parallm service start{' --system' if arguments.system else ''}\n")
        return 0
    if arguments.action == "uninstall":
        for path in _paths(is_system=arguments.system):
            if path.exists() and _check_ours(path):
                path.unlink()
                sys.stdout.write(f"{path} removed\n")
        return 0
    return _manage(arguments.action, is_system=arguments.system)


def served_by(keys: list[str]) -> Served:
    """Return the server of these keys. Raises CommandFailed for keys that no unit can have, or that are wrong."""
    try:
        config = compose("serve", ServeConfig, [*overrides_of("serve", keys), *keys]).config
    except ConfigError as error:
        raise CommandFailed(str(error)) from error
    for name, value, usual in (
        ("distributed.workers", config.distributed.workers, 1),
        ("distributed.tensor_parallel", config.distributed.tensor_parallel, 1),
        ("server.uds", config.server.uds, None),
    ):
        if value != usual:
            raise CommandFailed(f"{name}={value}: the unit is of one process at the user's own socket; leave it out")
    if config.server.port == 0:
        raise CommandFailed("server.port=0: a unit needs a port that stays; name one, or null")
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    return Served(
        python=os.path.abspath(sys.executable),  # noqa: PTH100  # not resolved: a link in a virtual environment
        keys=_absolute(keys),
        address=None if config.server.port is None else f"{host}:{config.server.port}",
        drain_seconds=config.server.drain_seconds,
        environment={name: os.environ[name] for name in INHERITED if name in os.environ},
    )


def _absolute(keys: list[str]) -> list[str]:
    """Return the keys with whole paths of what is here: a service starts in another folder."""
    words = (key.partition("=") for key in keys)
    return [
        f"{name}={Path(value).resolve()}" if value and ("/" in value or "." in value) and Path(value).exists() else key
        for key, (name, _, value) in zip(keys, words, strict=True)
    ]


def _files(arguments: Namespace) -> dict[Path, bytes]:
    served, paths = served_by(arguments.words), _paths(is_system=arguments.system)
    if IS_MAC:
        logs = state_folder()
        return {paths[0]: launchd_agent(served, logs=str(logs), folder=str(logs))}
    units = systemd_service(served, is_system=arguments.system), systemd_socket(served)
    return {path: text.encode() for path, text in zip(paths, units, strict=True)}


def _paths(*, is_system: bool) -> list[Path]:
    if IS_MAC:
        if is_system:
            raise CommandFailed("--system: on macOS the server is an agent of a user, whose GPU it uses")
        return [Path.home() / "Library/LaunchAgents" / f"{LABEL}.plist"]
    own = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd/user"
    folder = Path("/etc/systemd/system") if is_system else own
    return [folder / SERVICE, folder / SOCKET]


def _write(path: Path, content: bytes) -> None:
    try:
        if path.exists():
            _check_ours(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if IS_MAC:
            state_folder().mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}; --print shows what belongs there") from error
    sys.stdout.write(f"{path} written\n")


def _check_ours(path: Path) -> bool:
    if MARK.encode() not in path.read_bytes():
        raise CommandFailed(f"{path} is not by `parallm service install`; move it away first")
    return True


def _manage(action: str, *, is_system: bool) -> int:
    """Run the service manager's own command, which is shown."""
    if IS_MAC:
        domain, (plist,) = f"gui/{os.getuid()}", _paths(is_system=is_system)
        words = {
            "start": ["launchctl", "bootstrap", domain, str(plist)],
            "stop": ["launchctl", "bootout", f"{domain}/{LABEL}"],
            "logs": ["tail", "-n", "100", "-F", str(state_folder() / "serve.log")],
        }[action]
        commands = [words]
    else:
        scope = [] if is_system else ["--user"]
        commands = {
            "start": [
                ["systemctl", *scope, "daemon-reload"],
                ["systemctl", *scope, "enable", "--now", SOCKET, SERVICE],
            ],
            "stop": [["systemctl", *scope, "disable", "--now", SOCKET, SERVICE]],
            "logs": [["journalctl", *scope, "-f", "-n", "100", "-u", SERVICE]],
        }[action]
    for words in commands:
        sys.stderr.write(f"{' '.join(words)}\n")
        try:
            if code := subprocess.run(words, check=False).returncode:
                return code
        except OSError as error:
            raise CommandFailed(f"{words[0]} cannot be run here: {error.strerror}") from error
    return 0
