"""`python -m parallm.serve`: serve a model without training it."""

import sys

from parallm.run.command import run_command


def main() -> None:
    sys.exit(run_command("serve"))


if __name__ == "__main__":
    main()
