"""`python -m parallm.evaluate`: adapters and the base side by side on held-out problems."""

from parallm.run.start import start


def main() -> None:
    start("evaluate")


if __name__ == "__main__":
    main()
