"""Do unmodified environments of Atropos train on ParaLLM? Twelve checks with real processes on loopback.

Each has a control in it that must fail. The model is the embedded one, and --model where others' environments are run.
atroposlib is installed from PyPI into an environment of its own, as for check_clients.py. Returns 1 if a check fails.
"""

import os
import sys
import tempfile
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atropos_checks.contract import contract, logprob_truth
from atropos_checks.failures import api_killed, environment_killed, trainer_killed
from atropos_checks.gradients import loss_parity
from atropos_checks.groups import bad_data, mixed_groups, stale_versions
from atropos_checks.learning import learning, real_environments
from atropos_checks.stage import Bench, Finding, NotHere
from atropos_checks.traffic import cancellations
from check_clients import OPENAI
from job import absolute
from peers import DEFAULT_FOLDER, plain_python
from report import print_figures, print_table

CHECKS: Mapping[int, Callable[[Bench], Finding]] = {
    1: contract,
    2: logprob_truth,
    3: learning,
    4: real_environments,
    5: loss_parity,
    6: api_killed,
    7: environment_killed,
    8: mixed_groups,
    9: stale_versions,
    10: bad_data,
    11: trainer_killed,
    12: cancellations,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    number: int
    verdict: str
    seconds: float
    remark: str
    figures: Mapping[str, float] = field(default_factory=dict)


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", type=int, choices=sorted(CHECKS), help="these checks alone")
    parser.add_argument("--model", help="a folder with a model that solves some of GSM8K")
    parser.add_argument("--data", help="a folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument(
        "--environments",
        default=os.environ.get("PARALLM_ATROPOS"),
        help="the folder `environments` of a clone of Atropos (PARALLM_ATROPOS)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="of the learning check (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="of the learning check (default: %(default)s)")
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="where atroposlib is installed")
    parser.add_argument("--keep", type=Path, help="an empty folder for what the checks leave behind")
    arguments = parser.parse_args()
    python = plain_python(arguments.peers, "clients-openai", OPENAI)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(
            python=python,
            folder=(arguments.keep or Path(name)).absolute(),
            model=arguments.model and absolute(arguments.model),
            data=arguments.data and absolute(arguments.data),
            environments=arguments.environments and absolute(arguments.environments),
            seeds=range(arguments.seeds),
            steps=arguments.steps,
        )
        outcomes = [run(number, bench) for number in arguments.only or CHECKS]
    rows = [("", "check", "", "seconds", "")]
    rows += [
        (str(one.number), CHECKS[one.number].__name__, one.verdict, f"{one.seconds:.0f}", one.remark)
        for one in outcomes
    ]
    print_table("Atropos", rows)
    print_figures(figures_of(outcomes))
    return int(any(one.verdict == "FAILED" for one in outcomes))


def run(number: int, bench: Bench) -> Outcome:
    check, began = CHECKS[number], time.monotonic()
    print(f"{number} {check.__name__} ...", file=sys.stderr, flush=True)
    figures: Mapping[str, float] = {}
    try:
        found = check(bench.of(check.__name__))
        verdict, remark, figures = "passed", found.remark, found.figures
    except NotHere as error:
        verdict, remark = "not run", str(error)
    except Exception as error:  # noqa: BLE001  # whatever it was, the other checks are made
        traceback.print_exc()
        verdict, remark = "FAILED", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Outcome(number=number, verdict=verdict, seconds=time.monotonic() - began, remark=remark, figures=figures)


def figures_of(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Checks that lack something to run with count in neither number."""
    counts = {verdict: float(sum(one.verdict == verdict for one in outcomes)) for verdict in ("passed", "FAILED")}
    found: dict[str, float | None] = {
        "atropos.checks_passed": counts["passed"],
        "atropos.checks_failed": counts["FAILED"],
        "atropos.checks_total": sum(counts.values()),
    }
    for name, choose in (("ledger_join_fraction", min), ("reward_gain", min), ("itl_p50_ratio", max)):
        values = [one.figures[name] for one in outcomes if name in one.figures]
        if values:
            found[f"atropos.{name}"] = choose(values)
    return found


if __name__ == "__main__":
    sys.exit(main())
