"""The user's configuration file: where it is, what it says, and whether every command can use it."""

import sys
from argparse import Namespace

from parallm.cli.connection import CommandFailed, command
from parallm.config.compose import compose
from parallm.config.schema import COMMANDS
from parallm.config.user_file import overrides_of
from parallm.errors import ConfigError
from parallm.user_folders import CONFIG_VARIABLE, OFF, config_file


@command
def config(arguments: Namespace) -> int:
    """Print the path, or the keys of each command; or compose each command with them."""
    path = config_file()
    if path is None:
        raise CommandFailed(f"{CONFIG_VARIABLE}={OFF}: no configuration file is read; unset it")
    if arguments.action == "path":
        sys.stdout.write(f"{path}\n")
        return 0
    try:
        for name, kind in COMMANDS.items():
            added = overrides_of(name)
            if arguments.action == "show" and added:
                sys.stdout.write(f"{name}  {' '.join(added)}\n")
            elif arguments.action == "check":
                compose(name, kind, added)
    except ConfigError as error:
        raise CommandFailed(str(error)) from error
    if arguments.action == "check":
        sys.stdout.write(
            f"{path}: {'every command can use it' if path.exists() else 'does not exist, which is fine'}\n"
        )
    return 0
