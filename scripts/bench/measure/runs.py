"""Whole runs on a GPU, each to its end: no error, and its figures.

Shapes have random weights; a limit that is drawn for each completion stands for the end token there.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.compare import print_table, ratio
from bench.measure.training import QUICK, trained
from bench.measurement import Bar, Figures, Request, measurement
from bench.problems import environment_overrides
from bench.processes import Server, metrics, work

WARM_UP = 2
"""First steps of a process, in which it compiles."""
SHAPE_RUNS: Mapping[str, Mapping[str, Any]] = {
    "05b": {"shape": "0.5b", "steps": 5, "prompts": 16, "longest": 512, "has_parts": True},
    "8b": {"shape": "8b", "steps": 5, "prompts": 16, "longest": 512, "has_parts": True},
    "8b_4bit": {"shape": "8b-4bit", "steps": 3, "prompts": 16, "longest": 256, "has_parts": False},
}
SHORTEST, GROUP_SIZE = 16, 8
COLUMNS = ("seconds", "rollout", "update", "sampled", "trained")
KILLED_AT = 0.45
"""Of the steps of the run that is killed."""
SECONDS_OF_RUN = 400.0


@measurement(
    {"runs.gpu.quickstart.accuracy_after": Bar(min=0.85, needs="gpu"), "runs.gpu.quickstart.train_seconds": Bar()},
    minutes=2,
    needs="gpu",
    is_quick_anywhere=True,
)
def run_quickstart(request: Request) -> Figures:
    more = QUICK if request.is_quick else ()
    figures, _ = trained(
        [sys.executable, "-m", "parallm.train", "+recipe=arithmetic_grpo"], more, "runs.gpu.quickstart"
    )
    return dict(figures)


@measurement(
    {
        "gpu.mathling.step_seconds": Bar(max=2, needs="model gpu"),
        "runs.gpu.mathling.steps": Bar(min=100, needs="model gpu"),
        "runs.gpu.mathling.kills": Bar(min=1, needs="gpu"),
        "runs.gpu.mathling.steps_done_again": Bar(max=10, needs="gpu"),
        "runs.gpu.mathling.steps_skipped": Bar(max=0, needs="gpu"),
        "runs.gpu.mathling.sampled_tokens_per_second": Bar(),
        "runs.gpu.mathling.update_seconds": Bar(),
        "runs.gpu.mathling.reward_gain": Bar(),
    },
    minutes=3,
    needs="gpu",
    is_quick_anywhere=True,
)
def run_mathling(request: Request) -> Iterator[Figures]:
    """100 steps of 64 problems x 16 with default settings, killed by SIGKILL on the way and resumed. It saves every
    tenth step, so as many may be done again."""
    steps, every = request.size(100, 8), request.size(10, 1)
    job = ["+recipe=gsm8k_grpo", f"model.path={request.model}", *environment_overrides(request.data, 7473)]
    job += [f"rollout.problems_per_step={request.size(64, 2)}", f"rollout.group_size={request.size(16, 4)}"]
    job += [f"trainer.steps={steps}", "trainer.evaluate_problems=0", f"checkpoint.every={every}"]
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        own = ["checkpoint.resume=auto", "name=bench", f"hydra.run.dir={run}"]
        server = Server("parallm.train", [*job, *own], Path(name))
        server.spawn()
        num_before = wait_for_steps(server, run, round(KILLED_AT * steps))
        server.kill()
        if before := [row for row in metrics(run) if row["step"] > WARM_UP]:
            yield mathling_speeds(before)
        saved = max((int(folder.name.partition("_")[2]) for folder in run.glob("step_*")), default=0)
        server.spawn()
        server.wait_to_end(SECONDS_OF_RUN)
        yield mathling_figures(num_before, saved, metrics(run))


def wait_for_steps(server: Server, run: Path, steps: int) -> int:
    """The number of steps when there are as many. Raises RuntimeError if the run ends before, or takes too long."""
    deadline = time.monotonic() + SECONDS_OF_RUN
    while time.monotonic() < deadline:
        rows = metrics(run) if (run / "metrics.jsonl").exists() else []
        if len(rows) >= steps:
            return len(rows)
        server.check_alive()
        time.sleep(0.05)
    raise RuntimeError(f"no {steps} steps within {SECONDS_OF_RUN:.0f} s:\n{server.log_tail()}")


def mathling_figures(num_before: int, saved: int, rows: Sequence[Mapping[str, Any]]) -> Figures:
    """`num_before`: steps at the kill, of which `saved` were kept. Each process compiles in its first steps."""
    warm = [row for row in rows if row["step"] > WARM_UP and not saved < row["step"] <= saved + WARM_UP]
    rewards = [row["reward/mean"] for row in rows]
    tenth = max(1, len(rows) // 10)
    return mathling_speeds(warm) | {
        "runs.gpu.mathling.steps": len({row["step"] for row in rows}),
        "runs.gpu.mathling.kills": float(0 < num_before < len(rows)),
        "runs.gpu.mathling.steps_done_again": num_before - saved,
        "runs.gpu.mathling.steps_skipped": sum(row["update/skipped"] is not None for row in rows),
        "runs.gpu.mathling.reward_gain": fmean(rewards[-tenth:]) - fmean(rewards[:tenth]),
    }


def mathling_speeds(warm: Sequence[Mapping[str, Any]]) -> Figures:
    return {
        "gpu.mathling.step_seconds": median(row["seconds/total"] for row in warm),
        "runs.gpu.mathling.sampled_tokens_per_second": median(
            row["rollout/tokens"] / row["seconds/rollout"] for row in warm
        ),
        "runs.gpu.mathling.update_seconds": median(row["seconds/update"] for row in warm),
    }


@measurement(
    {
        "gpu.grpo_step.vs_parts": Bar(max=1.2, needs="gpu"),
        **{f"runs.gpu.{name}.step_seconds": Bar() for name in SHAPE_RUNS},
        **{f"runs.gpu.{name}.vs_parts": Bar() for name, run in SHAPE_RUNS.items() if run["has_parts"]},
        **{f"runs.gpu.{name}.steps": Bar(min=run["steps"], needs="gpu") for name, run in SHAPE_RUNS.items()},
    },
    minutes=3,
    needs="gpu",
    is_quick_anywhere=True,
)
def run_shapes(request: Request) -> Iterator[Figures]:
    """Steps of 16 x 8 completions of 16 to `longest` tokens. A step over the time that its tokens take by themselves:
    sampled as its own requests are without a trainer, trained on as an update alone does. Of the shape that does
    worse."""
    ratios = []
    for name, run in SHAPE_RUNS.items():
        wants_ratio = run["has_parts"] and request.wants("gpu.grpo_step.vs_parts")
        if not wants_ratio and not request.wants(f"runs.gpu.{name}.steps"):
            continue
        job = {**run, "shortest": SHORTEST, "group_size": GROUP_SIZE}
        if request.is_quick:
            shape = "tiny-4bit" if "bit" in name else "tiny"
            job |= {"shape": shape, "steps": 3, "prompts": 2, "longest": 32, "shortest": 4}
        try:
            found = work("random_run", **job)
        except RuntimeError as error:
            print(f"  {name} failed: {str(error)[-1500:]}", flush=True)
            continue
        steps = [
            dict(zip(COLUMNS, values, strict=True)) for values in zip(*(found[one] for one in COLUMNS), strict=True)
        ]
        rates = found.get("rates", {})
        rows = [[step[column] for column in COLUMNS] for step in steps]
        header = ("", *COLUMNS, "sampled/s alone", "trained/s alone")
        print_table(
            "Steps of ragged completions",
            [header, *((name, *row, *(rates.get(part, "-") for part in ("sampling", "update"))) for row in rows)],
        )
        figures: Figures = {f"runs.gpu.{name}.steps": len(steps)}
        figures[f"runs.gpu.{name}.step_seconds"] = median(step["seconds"] for step in steps[WARM_UP:])
        if run["has_parts"]:
            ratios.append(step_vs_parts(steps[WARM_UP:], rates))
            figures[f"runs.gpu.{name}.vs_parts"] = ratios[-1]
        yield figures
    if len(ratios) == sum(run["has_parts"] for run in SHAPE_RUNS.values()):
        yield {"gpu.grpo_step.vs_parts": max(ratios)}


def step_vs_parts(steps: Sequence[Mapping[str, float]], rates: Mapping[str, float]) -> float:
    """The median step; `rates` are tokens/s of the parts."""
    return median(
        step["seconds"] / (step["sampled"] / rates["sampling"] + step["trained"] / rates["update"]) for step in steps
    )


@measurement(
    {
        "runs.gpu.atropos.steps": Bar(min=6, needs="gpu"),
        "runs.gpu.atropos.joined_fraction": Bar(min=1, needs="gpu"),
        "runs.gpu.atropos.step_seconds": Bar(),
    },
    minutes=1.5,
    needs="gpu",
    is_quick_anywhere=True,
)
def run_atropos(request: Request) -> Figures:
    """A run under run-api, as tests/run_api.py has it: atroposlib itself is measured elsewhere (`atropos.`). One
    environment posts groups until the run has its steps."""
    sizes = {"steps": request.size(6, 2), "problems": request.size(8, 2), "group_size": GROUP_SIZE}
    rows = work("atropos_run", model=request.model, **sizes)["rows"]
    return {
        "runs.gpu.atropos.steps": len(rows),
        "runs.gpu.atropos.joined_fraction": min(row["atropos/joined_fraction"] for row in rows),
        "runs.gpu.atropos.step_seconds": median(row["seconds/total"] for row in rows[1:]),
    }


@measurement(
    {
        f"runs.gpu.speculation.{task}.rows{rows}_{what}": Bar()
        for task in ("greedy", "sampled")
        for rows in (1, 4)
        for what in ("vs_none", "same_share")
    },
    minutes=1,
    needs="gpu",
    is_quick_anywhere=True,
)
def run_speculation(request: Request) -> Iterator[Figures]:
    """Tokens/s with n-gram lookup over none, and the share of completions that are the same, bfloat16."""
    for rows in (1, 4):
        figures: Figures = {}
        job = {"model": request.model, "data": request.data, "rows": rows, "prompts": request.size(8, 2)}
        found = work("speculation_speed", **job, max_tokens=request.size(128, 16), rounds=request.size(2, 1))
        for task in ("greedy", "sampled"):
            pairs = [[one["tokens_per_second"] for one in found[f"{task}/{way}"]] for way in ("ngram", "none")]
            figures[f"runs.gpu.speculation.{task}.rows{rows}_vs_none"] = ratio(*pairs)
            figures[f"runs.gpu.speculation.{task}.rows{rows}_same_share"] = min(
                one["same"] for one in found[f"{task}/ngram"]
            )
        yield figures
