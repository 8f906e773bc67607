"""`python -m parallm.evaluate`: adapters and the base side by side on held-out problems."""

import sys
from pathlib import Path

from parallm.config.schema import EvaluateConfig
from parallm.device.blas import BlasReport
from parallm.run.command import run_command


def main() -> None:
    sys.exit(run_command("evaluate", EvaluateConfig, run))


def run(config: EvaluateConfig, folder: Path, blas: BlasReport) -> int:
    # not at the top: it loads MLX, which takes whatever BLAS the process has by then
    from parallm.run.evaluate import run_evaluation  # noqa: PLC0415

    return run_evaluation(config, folder, blas)


if __name__ == "__main__":
    main()
