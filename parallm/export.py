"""`python -m parallm.export`: an adapter in the formats of other programs, and merged into its base."""

import sys

from parallm.interrupts import quietly


def main() -> None:
    with quietly():
        from parallm.run.command import run_command  # noqa: PLC0415  # takes a second, in which Ctrl-C may come

        sys.exit(run_command("export"))


if __name__ == "__main__":
    main()
