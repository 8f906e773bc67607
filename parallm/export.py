"""`python -m parallm.export`: an adapter in the formats of other programs, and merged into its base."""

from parallm.run.start import start


def main() -> None:
    start("export")


if __name__ == "__main__":
    main()
