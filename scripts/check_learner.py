"""Does the learner compute what TRL and prime-rl compute? Loss and gradient of every oracle case, in float32.

The oracles' numbers, made in float64, are in tests/learner/oracles.
"""

from argparse import ArgumentParser

from job import Job, blas_name, run_worker
from report import print_figures, print_table


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--blas", default="auto", help="auto, mkl, openblas or reference (default: %(default)s)")
    job = Job(blas=parser.parse_args().blas)
    cases = run_worker("oracles", job)["cases"]
    rows = [(one["name"], f"{one['loss']:.1e}", f"{one['gradient']:.1e}") for one in cases]
    print_table("Difference to the oracle", [("case", "loss", "gradient, largest"), *rows])
    worst = max(max(one["loss"], one["gradient"]) for one in cases)
    print_figures({"oracle.worst_error": worst, "oracle.cases": len(cases)}, device=blas_name(job))


if __name__ == "__main__":
    main()
