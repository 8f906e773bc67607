"""Does the learner compute what TRL and prime-rl compute? Loss and gradient of every oracle case, in float32.

The oracles' numbers, made in float64, are in tests/learner/oracles. With --regenerate: do TRL, and prime-rl where there
is a clone of it, still give these numbers? With --presets: do all presets learn? Whole training runs of the nano model
on the arithmetic recipe, each until the target of the table in learning_runs.py, and a control with learning rate 0.
"""

import os
from argparse import ArgumentParser
from pathlib import Path

from job import Job, blas_name, run_worker
from learning_runs import TARGETS, check_presets
from oracle_sources import check_sources
from peers import DEFAULT_FOLDER
from report import print_figures, print_table


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--blas", default="auto", help="auto, mkl, openblas or reference (default: %(default)s)")
    parser.add_argument("--presets", nargs="*", choices=TARGETS, help="train these instead; without a name: all")
    parser.add_argument("--seeds", type=int, default=3, help="of each preset (default: %(default)s)")
    parser.add_argument("--regenerate", action="store_true", help="compute the oracles' numbers anew, and compare")
    parser.add_argument(
        "--prime-rl", default=os.environ.get("PARALLM_PRIME_RL"), help="a clone of prime-rl (PARALLM_PRIME_RL)"
    )
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="where TRL is installed (%(default)s)")
    arguments = parser.parse_args()
    job = Job(blas=arguments.blas)
    figures: dict[str, float]
    if arguments.regenerate:
        figures = check_sources(arguments.peers, arguments.prime_rl)
    elif arguments.presets is None:
        figures = check_oracles(job)
    else:
        figures = check_presets(arguments.presets or list(TARGETS), arguments.seeds, f"device.blas={job.blas}")
    print_figures(figures, device=blas_name(job))


def check_oracles(job: Job) -> dict[str, float]:
    cases = run_worker("oracles", job)["cases"]
    rows = [(one["name"], f"{one['loss']:.1e}", f"{one['gradient']:.1e}") for one in cases]
    print_table("Difference to the oracle", [("case", "loss", "gradient, largest"), *rows])
    worst = max(max(one["loss"], one["gradient"]) for one in cases)
    return {"oracle.worst_error": worst, "oracle.cases": len(cases)}


if __name__ == "__main__":
    main()
