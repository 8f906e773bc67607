"""`python -m parallm.serve`: serve a model without training it."""

import sys
from pathlib import Path

from parallm.config.schema import ServeConfig
from parallm.device.blas import BlasReport
from parallm.run.command import run_command


def main() -> None:
    sys.exit(run_command("serve", ServeConfig, run))


def run(config: ServeConfig, _: Path, blas: BlasReport) -> int:
    # not at the top: it loads MLX, which takes whatever BLAS the process has by then
    from parallm.run.serve import run_serving  # noqa: PLC0415

    return run_serving(config, blas)


if __name__ == "__main__":
    main()
