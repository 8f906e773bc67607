"""`python -m parallm`: the list of commands."""

import sys

from parallm.config.command_line import asks_version, help_topics
from parallm.config.help import overview
from parallm.config.schema import COMMANDS
from parallm.metrics.machine import describe_versions


def main() -> int:
    """Answer --help and --version; explain anything else by the overview."""
    arguments = sys.argv[1:]
    if asks_version(arguments):
        sys.stdout.write(f"{describe_versions()}\n")
        return 0
    if help_topics(arguments) is not None:
        sys.stdout.write(overview())
        return 0
    if arguments and arguments[0] in COMMANDS:
        sys.stderr.write(f"parallm: a command is a module of its own: python -m parallm.{' '.join(arguments)}\n")
    else:
        sys.stderr.write(overview())
    return 2


if __name__ == "__main__":
    sys.exit(main())
