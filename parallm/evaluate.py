"""`python -m parallm.evaluate`: adapters and the base side by side on held-out problems."""

import sys

from parallm.run.command import run_command


def main() -> None:
    sys.exit(run_command("evaluate"))


if __name__ == "__main__":
    main()
