"""`python -m parallm.front`: one address before servers that run elsewhere."""

from parallm.run.start import start


def main() -> None:
    start("front")


if __name__ == "__main__":
    main()
