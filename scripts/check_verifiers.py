"""Do environments of the package verifiers train? Held-out reward before and after, beside a learning rate of 0.

Held-out answers are greedy, so that with a learning rate of 0 they do not change at all unless something other than the
gradient changes the policy. What is sampled in such a run changes by chance.

The package is installed from PyPI into an environment of its own (`--peers`), with ParaLLM and MLX, once as it is today
and once below 0.4 for environments with `load_environment`. What is trained are its own classes of environments, with
our word problems as data: a taskset of one turn, one with a scripted user that asks twice, and a SingleTurnEnv with a
rubric. With --model and --environments, also reverse-text of the authors' repository as it stands there. No network is
needed once the package is there.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from changes import Change, change_by_halves
from job import SCRIPTS, absolute, clean_environment
from peers import DEFAULT_FOLDER, plain_python
from report import print_figures, print_table
from verifiers_beginner import beginner, used_to_second_questions

from parallm.environment.arithmetic import Arithmetic
from parallm.environment.settings import ArithmeticSettings
from parallm.metrics.json_lines import read_rows
from parallm.types import Split

ENVIRONMENTS = SCRIPTS / "workers" / "verifiers"
NEWEST, CLASSIC = "verifiers==0.4.0", "verifiers==0.3.1"


NANO = ("model=nano", "rollout.problems_per_step=16", "rollout.max_tokens=128", "trainer.evaluate_problems=100")
TURNS, STOCK = "sums-in-turn", "reverse-text"
NOT_HERE = (STOCK, NEWEST, "not run: needs --model and --environments", "", "", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    figure: str
    environment: str
    settings: Sequence[str]
    modules: Path = ENVIRONMENTS
    """The folder in which the environment's module lies."""
    requirement: str = NEWEST
    steps: int = 24
    rates: Sequence[str] = ("2e-3", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    before: float
    after: float
    rewards: Change
    """Of the problems that were trained on, which are sampled with seeds of their own in each step: from the first half
    of the steps to the second."""
    faults: float

    @property
    def gain(self) -> float:
        return self.after - self.before


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="where it is installed (%(default)s)")
    parser.add_argument("--steps", type=int, help="of each run, in place of each environment's own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=["word-sums", "classic-sums", TURNS, STOCK])
    parser.add_argument("--model", help="a folder with a small model that knows digits, for reverse-text")
    parser.add_argument(
        "--environments",
        type=Path,
        default=os.environ.get("PARALLM_VERIFIERS"),
        help="the folder `environments` of a clone of verifiers (PARALLM_VERIFIERS)",
    )
    arguments = parser.parse_args()
    figures: dict[str, float | None] = {}
    table = [("environment", "package", "learning rate", "reward before", "after", "sampled, by halves of the run")]
    faults = 0.0
    with tempfile.TemporaryDirectory() as name:
        for case in cases(arguments, Path(name)):
            python = verifiers_python(arguments.peers, case.requirement)
            for rate in case.rates:
                run = trained(python, case, Path(name), arguments, rate)
                figures[f"{case.figure}.reward_gain" if float(rate) else f"{case.figure}.control_gain"] = run.gain
                if not float(rate):
                    figures[f"{case.figure}.control_reward_change"] = run.rewards.gain
                worth = (f"{run.before:.3f}", f"{run.after:.3f}", run.rewards.text())
                table.append((case.environment, case.requirement, rate, *worth))
                faults += run.faults
    if is_asked(arguments, STOCK) and not can_be_stock(arguments):
        table.append(NOT_HERE)
    print_table("Environments of verifiers: mean reward on held-out problems", table)
    print_figures(figures | {"verifiers.faults": faults})


def is_asked(arguments: Namespace, environment: str) -> bool:
    return not arguments.only or environment in arguments.only


def can_be_stock(arguments: Namespace) -> bool:
    return bool(arguments.model and arguments.environments)


def cases(arguments: Namespace, folder: Path) -> list[Case]:
    """What is asked for and can be run, with its data written to `folder`."""
    write_problems(folder)
    data = f"environment.options={{path: {folder}}}"
    held_out = "environment.test_options={split: test}"
    ours = [
        Case(figure="verifiers", environment="word-sums", settings=(*NANO, data, held_out, "rollout.max_turns=1")),
        Case(
            figure="verifiers.classic",
            environment="classic-sums",
            settings=(*NANO, data, "rollout.max_turns=1"),
            requirement=CLASSIC,
            rates=("2e-3",),
        ),
    ]
    found = [case for case in ours if is_asked(arguments, case.environment)]
    if is_asked(arguments, TURNS):
        found.append(turns_case((*NANO, data, held_out), folder / "turns", arguments.seed))
    if is_asked(arguments, STOCK) and can_be_stock(arguments):
        found.append(stock_case(arguments, folder / "stock"))
    return found


def turns_case(settings: Sequence[str], folder: Path, seed: int) -> Case:
    """Two questions in one conversation.

    A model that is not used to that takes the second one's numbers from the first, is right in one of 25, and goes on
    so: the first question's half of the reward is all that it learns to earn.
    """
    start = f"model.adapter={used_to_second_questions(folder, seed)}"
    return Case(figure="verifiers.turns", environment=TURNS, settings=(*settings, start, "rollout.max_turns=4"))


def stock_case(arguments: Namespace, folder: Path) -> Case:
    """reverse-text as its authors wrote it, with a model that has been taught the form of an answer."""
    made = beginner(absolute(arguments.model), folder, arguments.seed)
    return Case(
        figure="verifiers.stock",
        environment=STOCK,
        settings=(
            *(f"model.path={made.model}", f"model.adapter={made.adapter}"),
            *(
                f"environment.options.dataset_name={made.data}",
                "environment.num_test=64",
                "trainer.evaluate_problems=64",
            ),
            *("rollout.problems_per_step=8", "rollout.max_tokens=40", "rollout.max_turns=1"),
        ),
        modules=arguments.environments.resolve() / "reverse_text",
        steps=30,
        rates=("5e-4", "0"),
    )


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


def trained(python: str, case: Case, folder: Path, arguments: Namespace, rate: str) -> Run:
    """Raises RuntimeError with the last words of a run that fails."""
    run, steps = folder / f"{case.environment}-{rate}", arguments.steps or case.steps
    command = [
        *(python, "-m", "parallm.train", "environment=verifiers", f"environment.id={case.environment}"),
        *(*case.settings, f"learner.learning_rate={rate}", "learner.warmup_steps=0", "rollout.group_size=8"),
        *(f"trainer.steps={steps}", f"trainer.evaluate_every={steps}", f"seed={arguments.seed}", "name=verifiers"),
        *("server=off", "metrics.display=off", f"hydra.run.dir={run}"),
    ]
    environment = clean_environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{case.modules}"
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return read_run(read_rows(run / "evaluations.jsonl"), read_rows(run / "metrics.jsonl"))


def read_run(evaluations: Sequence[dict[str, float]], rows: Sequence[dict[str, float]]) -> Run:
    return Run(
        before=evaluations[0]["heldout/reward"],
        after=evaluations[-1]["heldout/reward"],
        rewards=change_by_halves([row["reward/mean"] for row in rows]),
        faults=sum(row.get("faults/total", 0.0) for row in rows),
    )


if __name__ == "__main__":
    main()
