"""`python -m parallm.train`: serve a model and train it."""

import sys

from parallm.interrupts import quietly


def main() -> None:
    with quietly():
        from parallm.run.command import run_command  # noqa: PLC0415  # takes a second, in which Ctrl-C may come

        sys.exit(run_command("train"))


if __name__ == "__main__":
    main()
