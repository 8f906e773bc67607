"""Is what is computed right, and does it learn? Parity, oracles, presets, reward models, sampling ahead."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.compare import in_turns, print_table, ratio
from bench.measurement import Bar, Figures, Request, has_gpu, measurement
from bench.processes import ROOT, blas_name, clean_environment, evaluations, metrics, train, work
from parallm.metrics.json_lines import read_rows


@measurement(
    {
        "parity.bit_equal_fraction": Bar(min=1.0, needs="strict"),
        "parity.mean_abs": Bar(max=5e-6),
        "parity.max_abs": Bar(max=1e-4),
        "parity.kl": Bar(max=1e-4),
        "parity.tokens": Bar(),
        "parity.strict": Bar(),
    },
    minutes=2,
)
def parity(request: Request) -> Figures:
    """Are the engine's log-probs those that the learner computes? Sampled under ragged continuous batching with LoRA.

    The figures are those of the model that does worst. The reference BLAS is shown as a control. Bfloat16 on a GPU.
    """
    dtype, tokens = "bfloat16" if has_gpu() else "auto", request.size(10_000, 1000)
    models: dict[str, Mapping[str, Any]] = {"nano": {"model": "nano", "data": None, "tokens": tokens}}
    if request.model != "nano":
        models[request.model] = {"model": request.model, "data": request.data, "tokens": tokens}
    found = {name: work("parity", dtype=dtype, **model) for name, model in models.items()}
    shown = dict(found)
    if not has_gpu():
        shown["nano, reference BLAS"] = work("parity", **models["nano"] | {"tokens": 1000, "blas": "reference"})
    columns = ("blas", "strict", "tokens", "bit_equal_fraction", "mean_abs", "max_abs", "kl")
    rows = [
        (name, *(f"{one[key]:.2g}" if "abs" in key or key == "kl" else one[key] for key in columns))
        for name, one in shown.items()
    ]
    print_table("Log-probs of engine and learner", [("model", *columns), *rows])
    results = list(found.values())
    return {
        "parity.bit_equal_fraction": min(one["bit_equal_fraction"] for one in results),
        **{f"parity.{name}": max(one[name] for one in results) for name in ("mean_abs", "max_abs", "kl")},
        "parity.tokens": min(one["tokens"] for one in results),
        "parity.strict": float(all(one["strict"] for one in results)),
    }


@measurement({"parity.strict_speed_ratio": Bar(min=0.9, needs="model strict")}, minutes=3)
def strict_mode(request: Request) -> Figures:
    """Speed of rollout and update in MKL's strict mode over that without it."""
    if blas_name() != "mkl, strict":
        return {"parity.strict_speed_ratio": None}

    def seconds(_: int, **more: Any) -> float:
        return float(work("step_speed", model=request.model, data=request.data, **more)["seconds"])

    found = in_turns(
        request.size(3, 1), {"strict": seconds, "not strict": lambda number: seconds(number, strict=False)}
    )
    return {"parity.strict_speed_ratio": ratio(found["not strict"], found["strict"])}


@measurement({"oracle.worst_error": Bar(max=1e-6), "oracle.cases": Bar(min=31)}, minutes=0.2)
def oracles(request: Request) -> Figures:
    """Loss and gradient of every case of tests/learner/oracles, in float32, against TRL's and prime-rl's numbers."""
    cases = work("oracles")["cases"]
    rows = [(one["name"], one["loss"], one["gradient"]) for one in cases]
    print_table("Difference to the oracle", [("case", "loss", "gradient, largest"), *rows])
    return {"oracle.worst_error": max(max(one["loss"], one["gradient"]) for one in cases), "oracle.cases": len(cases)}


# presets -------------------------------------------------------------------------------------------------------------

TARGET, STEPS = 0.85, 60
"""Held-out accuracy that the quickstart's recipe must reach within its steps: with the recipe's learning rate it is the
target of every preset. On strictly on-policy batches a ratio is 1, so no clip or gate slows a preset down."""
NOT_SAMPLED = ("sft", "reward_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run, which ends at its target."""

    evaluations: Sequence[Mapping[str, Any]]
    steps: Sequence[Mapping[str, Any]]

    @property
    def accuracies(self) -> list[float]:
        return [float(row["heldout/accuracy"]) for row in self.evaluations]

    @property
    def steps_to_target(self) -> int | None:
        """Finished steps at the first evaluation that reached the target; None if none did."""
        return next((int(row["step"]) for row in self.evaluations if is_reached(row)), None)

    @property
    def seconds(self) -> float:
        """The time of the steps up to the target, evaluations excluded."""
        return sum(float(row["seconds/total"]) for row in self.steps[: self.steps_to_target])


def is_reached(row: Mapping[str, Any]) -> bool:
    return bool(row["heldout/accuracy"] >= TARGET)


@measurement(
    {
        "presets.reached": Bar(min=10),
        "presets.total": Bar(),
        "presets.worst_accuracy": Bar(min=0.85),
        "presets.control_accuracy": Bar(max=0.45),
    },
    minutes=17,
)
def presets(request: Request) -> Figures:
    """Each preset that samples, on the arithmetic recipe with three seeds, and one with a learning rate of 0."""
    names = sorted(file.stem for file in (ROOT / "conf" / "learner").glob("*.yaml") if file.stem not in NOT_SAMPLED)
    names, seeds = (["grpo"], 1) if request.is_quick else (names, 3)
    runs = {(name, seed): learning_run(f"learner={name}", f"seed={seed}") for name in names for seed in range(seeds)}
    control = learning_run("learner=grpo", "learner.learning_rate=0")
    return preset_figures(runs, control)


def preset_figures(runs: Mapping[tuple[str, int], Run], control: Run) -> Figures:
    """A preset counts as reached if every seed gets there."""
    rows = [
        (name, seed, run.accuracies[0], run.accuracies[-1], run.steps_to_target or "not reached", run.seconds)
        for (name, seed), run in (runs | {("learning rate 0", 0): control}).items()
    ]
    header = ("preset", "seed", "before", "after", f"steps to {TARGET:.0%}", "seconds")
    print_table("Learning arithmetic: nano model, held-out accuracy", [header, *rows])
    names = {name for name, _ in runs}
    missed = {name for (name, _), run in runs.items() if run.steps_to_target is None}
    return {
        "presets.reached": len(names - missed),
        "presets.total": len(names),
        "presets.worst_accuracy": min(run.accuracies[-1] for run in runs.values()),
        "presets.control_accuracy": control.accuracies[-1],
    }


def learning_run(*overrides: str) -> Run:
    """Train until the target is reached, or to the end. Raises RuntimeError if the run fails."""
    with TemporaryDirectory() as folder:
        run, log = Path(folder) / "run", Path(folder) / "output"
        command = [
            *(sys.executable, "-m", "parallm.train", "+recipe=arithmetic_grpo", f"trainer.steps={STEPS}"),
            *("trainer.evaluate_every=4", "checkpoint.every=1000", "server=off", "metrics.display=off"),
            *(f"hydra.run.dir={run}", *overrides),
        ]
        with (
            log.open("w") as output,
            subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=output, stderr=output) as process,
        ):
            while process.poll() is None and not any(map(is_reached, evaluations(run))):
                time.sleep(0.2)
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        if process.returncode not in (0, 130):
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        return Run(evaluations=evaluations(run), steps=metrics(run))


# a reward model ------------------------------------------------------------------------------------------------------

MAX_CHOSEN, MAX_REJECTED = 2, 3
"""Completions of a problem."""
PAID = (
    *("environment=custom", "environment.target=bench.problems:Unpaid", "rollout.group_size=8"),
    *("rollout.max_tokens=64", "rollout.refill_rounds=0", "checkpoint.every=1000", "seed=0"),
)
LEARNING = ("learner.learning_rate=2e-3", "rollout.problems_per_step=16")


@measurement(
    {
        "reward_model.pair_accuracy": Bar(min=0.8),
        "reward_model.accuracy_before": Bar(max=0.45),
        "reward_model.accuracy_best": Bar(min=0.7),
        "reward_model.accuracy_last": Bar(),
        "reward_model.control_pair_accuracy": Bar(max=0.7),
        "reward_model.control_gain": Bar(max=0.1),
    },
    minutes=4,
)
def reward_model(request: Request) -> Figures:
    """Does a policy learn from a reward model alone? The embedded model, word problems.

    Right and wrong answers of the base to the same problem make pairs, a reward model learns from these, and it alone
    pays a policy; whether the policy's answers are right is only looked at. The control does the same with pairs that a
    coin has turned round: that reward model must know nothing, and its policy must not get better.
    """
    steps = request.size(30, 3)
    with TemporaryDirectory() as name:
        folder = Path(name)
        pairs = sampled_pairs(folder / "samples", request.size(8, 3))
        told, accuracies = paid_policy(folder / "learned", pairs, steps)
        control_told, control = paid_policy(folder / "control", turned(pairs), steps)
    rows = [("learned", told, accuracies), ("pairs turned round", control_told, control)]
    print_table(f"{len(pairs)} pairs", [("", "told apart", "right answers"), *rows])
    return {
        "reward_model.pair_accuracy": told,
        "reward_model.accuracy_before": accuracies[0],
        "reward_model.accuracy_best": max(accuracies),
        "reward_model.accuracy_last": accuracies[-1],
        "reward_model.control_pair_accuracy": control_told,
        "reward_model.control_gain": max(control) - control[0],
    }


def sampled_pairs(run: Path, steps: int) -> list[dict[str, str]]:
    """Some right completions of each problem, each with some wrong ones, among those that ended by themselves."""
    settings = ("learner.learning_rate=0", "metrics.samples_per_step=1000", "trainer.evaluate_problems=0")
    train(run, *PAID, *settings, f"trainer.steps={steps}", "rollout.problems_per_step=48")
    texts: dict[tuple[str, bool], list[str]] = {}
    for sample in read_rows(run / "samples.jsonl"):
        own = texts.setdefault((sample["prompt"], sample["parts"]["correct"] == 1), [])
        if sample["finish_reason"] == "stop" and sample["completion"] not in own:
            own.append(sample["completion"])
    return [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt in dict.fromkeys(prompt for prompt, _ in texts)
        for chosen in texts.get((prompt, True), [])[:MAX_CHOSEN]
        for rejected in texts.get((prompt, False), [])[:MAX_REJECTED]
    ]


def turned(pairs: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    coin, both = random.Random(0), ("chosen", "rejected")
    return [
        {"prompt": pair["prompt"]} | dict(zip(both, coin.sample([pair[name] for name in both], 2), strict=True))
        for pair in pairs
    ]


def paid_policy(folder: Path, pairs: Sequence[Mapping[str, str]], steps: int) -> tuple[float, list[float]]:
    """The share of held-out pairs that the reward model tells apart, and the accuracies of its policy."""
    folder.mkdir()
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    model, policy = folder / "reward_model", folder / "policy"
    train(model, *PAID, "learner=reward_model", f"learner.data={data}", "trainer.steps=20", *LEARNING)
    looks = ("trainer.evaluate_problems=256", f"trainer.evaluate_every={max(1, steps // 3)}")
    train(policy, *PAID, f"rollout.reward_model.adapter={model}", *looks, f"trainer.steps={steps}", *LEARNING)
    told = float(evaluations(model)[-1]["heldout/accuracy"])
    return told, [float(row["heldout/accuracy"]) for row in evaluations(policy)]


# sampling ahead ------------------------------------------------------------------------------------------------------

MODES: Mapping[str, Mapping[str, Any]] = {
    "limit 0": {"ahead": 0},
    "limit 1": {"ahead": 1},
    "limit 1, switching in flight": {"ahead": 1, "switches": True},
    "limit 2": {"ahead": 2},
}


@measurement(
    {
        "offpolicy.max_lag": Bar(max=1),
        "offpolicy.k1_speedup": Bar(min=1.2),
        "offpolicy.k1_switching_speedup": Bar(),
        "offpolicy.k2_speedup": Bar(),
    },
    minutes=13,
)
def off_policy(request: Request) -> Figures:
    """Is no token older than the limit, and what does sampling ahead give where lengths are ragged?

    Whole steps relative to a limit of 0. With a limit of 1 a step's sampling may begin no sooner than the update two
    steps before has ended, so its longest completion still spans two steps.
    """
    small = {"model": request.model, "prompts": 2, "group_size": 4, "max_tokens": 64, "steps": request.size(200, 10)}
    watched = {name: work("off_policy", **small, **mode) for name, mode in MODES.items() if mode["ahead"]}
    if watched["limit 2"]["max_lag"] < 2:
        raise RuntimeError("with a limit of 2 no token was two versions old: the watch sees too little")
    timed = {"model": request.model, "prompts": 8, "group_size": 8, "max_tokens": 256, "steps": request.size(12, 8)}
    sides = {name: lambda _, mode=mode: work("off_policy", **timed, **mode)["seconds"] for name, mode in MODES.items()}
    seconds = in_turns(request.size(5, 1), sides)  # type: ignore[arg-type]  # the default is the loop's
    speedups = {name: ratio(seconds["limit 0"], values) for name, values in seconds.items()}
    rows = [(name, median(seconds[name]), speedup, watched.get(name, {})) for name, speedup in speedups.items()]
    print_table("Sampling ahead", [("", "s a step", "speedup", "age of tokens"), *rows])
    return {
        "offpolicy.max_lag": max(one["max_lag"] for name, one in watched.items() if name != "limit 2"),
        "offpolicy.k1_speedup": speedups["limit 1"],
        "offpolicy.k1_switching_speedup": speedups["limit 1, switching in flight"],
        "offpolicy.k2_speedup": speedups["limit 2"],
    }
