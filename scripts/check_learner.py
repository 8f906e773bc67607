"""Does the learner compute what TRL and prime-rl compute? Loss and gradient of every oracle case, in float32.

The oracles' numbers, made in float64, are in tests/learner/oracles. With --presets: do all presets learn? Whole
training runs of the nano model on the arithmetic recipe, each until the target of the table in learning_runs.py, and a
control whose learning rate is 0.
"""

from argparse import ArgumentParser

from job import Job, blas_name, run_worker
from learning_runs import TARGETS, check_presets
from report import print_figures, print_table


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--blas", default="auto", help="auto, mkl, openblas or reference (default: %(default)s)")
    parser.add_argument("--presets", nargs="*", choices=TARGETS, help="train these instead; without a name: all")
    parser.add_argument("--seeds", type=int, default=3, help="of each preset (default: %(default)s)")
    arguments = parser.parse_args()
    job = Job(blas=arguments.blas)
    if arguments.presets is None:
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
