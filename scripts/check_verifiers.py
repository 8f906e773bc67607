"""Do environments of the package verifiers train? Held-out reward before and after, beside a learning rate of 0.

The package is installed from PyPI into an environment of its own (`--peers`), with ParaLLM and MLX, once as it is today
and once below 0.4 for environments with `load_environment`. What is trained are its own classes of environments, with
our word problems as data: a taskset of one turn, one with a scripted user that asks twice, and a SingleTurnEnv with a
rubric. No network is needed once the package is there.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from job import SCRIPTS, clean_environment
from peers import DEFAULT_FOLDER, plain_python
from report import print_figures, print_table

from parallm.environment.arithmetic import Arithmetic
from parallm.environment.settings import ArithmeticSettings
from parallm.metrics.json_lines import read_rows
from parallm.types import Split

ENVIRONMENTS = SCRIPTS / "workers" / "verifiers"
NEWEST, CLASSIC = "verifiers==0.4.0", "verifiers==0.3.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    figure: str
    environment: str
    requirement: str = NEWEST
    max_turns: int = 1
    has_control: bool = True


CASES = (
    Case(figure="verifiers", environment="word-sums"),
    Case(figure="verifiers.turns", environment="sums-in-turn", max_turns=4),
    Case(figure="verifiers.classic", environment="classic-sums", requirement=CLASSIC, has_control=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    before: float
    after: float
    faults: float

    @property
    def gain(self) -> float:
        return self.after - self.before


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="where it is installed (%(default)s)")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", nargs="*", choices=[case.environment for case in CASES])
    arguments = parser.parse_args()
    figures: dict[str, float | None] = {}
    table = [("environment", "package", "learning rate", "reward before", "after")]
    faults = 0.0
    with tempfile.TemporaryDirectory() as folder:
        write_problems(Path(folder))
        for case in CASES:
            if arguments.only and case.environment not in arguments.only:
                continue
            python = verifiers_python(arguments.peers, case.requirement)
            rates = ("2e-3", "0") if case.has_control else ("2e-3",)
            for rate in rates:
                run = trained(python, case, Path(folder), arguments.steps, rate)
                figures[f"{case.figure}.{'control' if rate == '0' else 'reward'}_gain"] = run.gain
                table.append((case.environment, case.requirement, rate, f"{run.before:.3f}", f"{run.after:.3f}"))
                faults += run.faults
    print_table("Environments of verifiers: mean reward on held-out problems, nano model", table)
    print_figures(figures | {"verifiers.faults": faults})


def verifiers_python(folder: Path, requirement: str) -> str:
    """An interpreter with the package, ParaLLM's own requirements and the MLX that we have."""
    extra = "" if sys.platform == "darwin" else "[cpu]"
    ours = f"{SCRIPTS.parent.resolve()}{extra}"
    mlx = [f"mlx=={metadata.version('mlx')}", f"mlx-lm=={metadata.version('mlx-lm')}"]
    return plain_python(folder, requirement.replace("==", "-"), [ours, requirement, *mlx])


def write_problems(folder: Path) -> None:
    splits: tuple[Split, ...] = ("train", "test")
    for split in splits:
        problems = Arithmetic(ArithmeticSettings()).problems(split)
        rows = [json.dumps({"question": one.messages[0].content, "answer": one.answer}) for one in problems]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))


def trained(python: str, case: Case, folder: Path, steps: int, rate: str) -> Run:
    """Raises RuntimeError with the last words of a run that fails."""
    run = folder / f"{case.environment}-{rate}"
    is_classic = case.requirement == CLASSIC
    command = [
        *(python, "-m", "parallm.train", "model=nano", "environment=verifiers", "name=verifiers"),
        *(f"environment.id={case.environment}", f"environment.options={{path: {folder}}}"),
        *(() if is_classic else ("environment.test_options={split: test}",)),
        *(f"rollout.max_turns={case.max_turns}", "rollout.max_tokens=128", f"learner.learning_rate={rate}"),
        *("learner.warmup_steps=0", "rollout.problems_per_step=16", "rollout.group_size=8", f"trainer.steps={steps}"),
        *(f"trainer.evaluate_every={steps}", "trainer.evaluate_problems=100", "server=off", "metrics.display=off"),
        f"hydra.run.dir={run}",
    ]
    environment = clean_environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{ENVIRONMENTS}"
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return read_run(read_rows(run / "evaluations.jsonl"), read_rows(run / "metrics.jsonl"))


def read_run(evaluations: Sequence[dict[str, float]], rows: Sequence[dict[str, float]]) -> Run:
    return Run(
        before=evaluations[0]["heldout/reward"],
        after=evaluations[-1]["heldout/reward"],
        faults=sum(row.get("faults/total", 0.0) for row in rows),
    )


if __name__ == "__main__":
    main()
