"""`python -m parallm.train`: serve a model and train it."""

import sys

from parallm.run.command import run_command


def main() -> None:
    sys.exit(run_command("train"))


if __name__ == "__main__":
    main()
