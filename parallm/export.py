"""`python -m parallm.export`: an adapter in the formats of other programs, and merged into its base."""

import sys

from parallm.run.command import run_command


def main() -> None:
    sys.exit(run_command("export"))


if __name__ == "__main__":
    main()
