"""`python -m parallm.train`: serve a model and train it."""

import sys
from pathlib import Path

from parallm.config.schema import RunConfig
from parallm.device.blas import BlasReport
from parallm.run.command import run_command


def main() -> None:
    sys.exit(run_command("train", RunConfig, run))


def run(config: RunConfig, folder: Path, blas: BlasReport) -> int:
    # not at the top: it loads MLX, which takes whatever BLAS the process has by then
    from parallm.run.train import run_training  # noqa: PLC0415

    return run_training(config, folder, blas)


if __name__ == "__main__":
    main()
