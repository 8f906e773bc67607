"""`python -m parallm.train`: serve a model and train it."""

from parallm.run.start import start


def main() -> None:
    start("train")


if __name__ == "__main__":
    main()
