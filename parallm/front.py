"""`python -m parallm.front`: one address before servers that run elsewhere."""

import sys

from parallm.run.command import run_command


def main() -> None:
    sys.exit(run_command("front"))


if __name__ == "__main__":
    main()
