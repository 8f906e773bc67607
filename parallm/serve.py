"""`python -m parallm.serve`: serve a model without training it."""

from parallm.run.start import start


def main() -> None:
    start("serve")


if __name__ == "__main__":
    main()
