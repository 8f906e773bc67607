"""Starts a command. Its modules take a second to import, and Ctrl-C shows no traceback meanwhile."""

import sys
from typing import NoReturn

from parallm.interrupts import INTERRUPTED


def start(name: str) -> NoReturn:
    """Run the command of that name with the words of the command line, and end the process with its code."""
    try:
        from parallm.run.command import run_command  # noqa: PLC0415  # see above

        sys.exit(run_command(name))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
