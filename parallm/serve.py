"""`python -m parallm.serve`: serve a model without training it."""

import sys

from parallm.interrupts import quietly


def main() -> None:
    with quietly():
        from parallm.run.command import run_command  # noqa: PLC0415  # takes a second, in which Ctrl-C may come

        sys.exit(run_command("serve"))


if __name__ == "__main__":
    main()
