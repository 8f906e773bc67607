"""`python -m parallm.export`: an adapter in the formats of other programs, and merged into its base."""

import sys
from pathlib import Path

from parallm.config.schema import ExportConfig
from parallm.device.blas import BlasReport
from parallm.run.command import run_command


def main() -> None:
    sys.exit(run_command("export", ExportConfig, run))


def run(config: ExportConfig, folder: Path, _: BlasReport) -> int:
    # not at the top: it loads MLX, which takes whatever BLAS the process has by then
    from parallm.run.export import run_export  # noqa: PLC0415

    return run_export(config, folder)


if __name__ == "__main__":
    main()
