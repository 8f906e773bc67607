"""Every figure, measured and shown beside its bar in one table. Ends with 1 if one falls short or is missing.

A script that crashes costs its own figures only. With --only, figures of other measurements may be missing.

Bars that are about a model of some size need --model (or PARALLM_MODEL) and --data (or PARALLM_GSM8K); without them
these are measured on the nano model where that is possible, and not judged. Bars that are about an NVIDIA GPU are
measured and judged where MLX has one; their peers need --torch-python (or PARALLM_TORCH_PYTHON).
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from job import SCRIPTS, absolute, clean_environment
from report import last_json, print_figures, print_table

Figures = dict[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """`least` or `most` is the bar; neither: the figure is only shown. With `needs_model` it holds for --model only."""

    least: float | None = None
    most: float | None = None
    most_figure: str | None = None
    """The figure that holds `most`, where it depends on the model."""
    needs_model: bool = False
    needs_gpu: bool = False
    """About an NVIDIA GPU; not judged on other machines."""
    is_optional: bool = False
    """Needs sources of others that no registry has; judged where it was measured."""

    def is_met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def with_bounds(self, figures: Figures) -> "Bar":
        return self if self.most_figure is None else replace(self, most=figures.get(self.most_figure))

    @property
    def is_bar(self) -> bool:
        return self != Bar()

    def text(self) -> str:
        parts = [f">= {self.least:g}"] if self.least is not None else []
        return " and ".join(parts + ([f"<= {self.most:g}"] if self.most is not None else []))


BARS: Mapping[str, Bar] = {
    "intervals.worst_coverage": Bar(least=0.93),
    "intervals.worst_width_ratio": Bar(most=1.3),
    "intervals.one_way_coverage": Bar(least=0.9),
    "intervals.control_coverage": Bar(most=0.5),
    "intervals.cases": Bar(),
    "mutants.tried": Bar(least=30),
    "mutants.survived": Bar(most=0),
    "quickstart.accuracy_before": Bar(most=0.45),
    "quickstart.accuracy_after": Bar(least=0.85),
    "quickstart.train_seconds": Bar(most=480),
    "quickstart.peak_memory_gb": Bar(),
    "quickstart.control_change": Bar(least=-0.05, most=0.05),
    "gsm8k.peak_memory_gb": Bar(most=4.295, needs_model=True),
    "gsm8k.reward_first": Bar(),
    "gsm8k.reward_last": Bar(least=0.5, needs_model=True),
    "gsm8k.reward_rise": Bar(least=0.2, needs_model=True),
    "parity.bit_equal_fraction": Bar(least=1.0),
    "parity.mean_abs": Bar(most=5e-6),
    "parity.max_abs": Bar(most=1e-4),
    "parity.kl": Bar(most=1e-4),
    "parity.strict_speed_ratio": Bar(least=0.9, needs_model=True),
    "parity.kv_bits8.mean_abs": Bar(),
    "parity.kv_bits8.max_abs": Bar(),
    "engine.cpu.vs_batchgenerator": Bar(least=2.5, needs_model=True),
    "engine.cpu.vs_stock_mlx_lm": Bar(least=12, needs_model=True),
    "learner.cpu.vs_mlx_lm_lora": Bar(),
    "grpo_step.cpu.vs_mlx_lm_lora": Bar(least=5, needs_model=True),
    "grpo_step.cpu.vs_mlx_lm_lora_same_blas": Bar(),
    "grpo_step.cpu.vs_naive": Bar(least=2, needs_model=True),
    "oracle.worst_error": Bar(most=1e-6),
    "oracle.cases": Bar(least=31),
    "presets.reached": Bar(least=10),
    "presets.worst_accuracy": Bar(least=0.85),
    "presets.control_accuracy": Bar(most=0.45),
    "publish.p99_ms": Bar(most=10),
    "publish.failed_requests": Bar(most=0),
    "serving.itl_p50_ratio_while_training": Bar(most=2),
    "serving.errors_while_training": Bar(most=0),
    "ab.share_error": Bar(most=0.02),
    "ab.failed_requests": Bar(most=0),
    "live.reward_before": Bar(),
    "live.reward_after": Bar(),
    "live.reward_gain": Bar(least=0.2),
    "live.control_gain": Bar(least=-0.05, most=0.05),
    "live.failed_requests": Bar(most=0),
    "live.kills": Bar(least=50),
    "live.ratings": Bar(least=500),
    "live.ratings_lost": Bar(most=0),
    "live.trained_twice": Bar(most=0),
    "live.resent": Bar(least=50),
    "live.wrong_answers": Bar(most=0),
    "live.control_lost": Bar(least=1),
    "live.control_twice": Bar(least=1),
    "serve.kills": Bar(least=20),
    "serve.changes": Bar(least=200),
    "serve.wrong_states": Bar(most=0),
    "serve.control_wrong_states": Bar(least=1),
    "fuzz.requests": Bar(least=100_000),
    "fuzz.server_errors": Bar(most=0),
    "fuzz.engine_alive": Bar(least=1),
    "fuzz.memory_growth_mb": Bar(most=32),
    "fuzz.files_growth": Bar(most=8),
    "fuzz.control_errors": Bar(least=1),
    "load.clients": Bar(least=200),
    "load.requests": Bar(),
    "load.checked": Bar(least=1000),
    "load.lost": Bar(most=0),
    "load.wrong": Bar(most=0),
    "load.leaked_slots": Bar(most=0),
    "load.leaked_kv_share": Bar(most=0),
    "hostile.attacks": Bar(least=8),
    "hostile.not_refused": Bar(most=0),
    "hostile.honest_answers": Bar(least=100),
    "hostile.honest_wrong": Bar(most=0),
    "hostile.honest_lost": Bar(most=0),
    "hostile.worst_delay_seconds": Bar(most=2),
    "hostile.steps": Bar(least=10),
    "hostile.rows_lost": Bar(most=0),
    "hostile.steps_skipped": Bar(most=0),
    "hostile.versions_rolled_back": Bar(most=0),
    "hostile.checkpoints_failed": Bar(most=0),
    "hostile.memory_growth_mb": Bar(most=256),
    "hostile.files_growth": Bar(most=8),
    "hostile.alive": Bar(least=1),
    "hostile.control_seen": Bar(least=3),
    "clients.passed": Bar(),
    "clients.total": Bar(least=132),
    "clients.failed": Bar(most=0),
    "verifiers.reward_gain": Bar(least=0.2),
    "verifiers.control_gain": Bar(least=-0.05, most=0.05),
    "verifiers.turns.reward_gain": Bar(least=0.2),
    "verifiers.turns.control_gain": Bar(least=-0.05, most=0.05),
    "verifiers.classic.reward_gain": Bar(least=0.2),
    "verifiers.stock.reward_gain": Bar(least=0.2, is_optional=True),
    "verifiers.stock.control_gain": Bar(least=-0.05, most=0.05, is_optional=True),
    "verifiers.faults": Bar(most=0),
    "atropos.checks_passed": Bar(),
    "atropos.checks_total": Bar(least=11),
    "atropos.checks_failed": Bar(most=0),
    "atropos.ledger_join_fraction": Bar(least=1),
    "atropos.reward_gain": Bar(least=0.1),
    "atropos.itl_p50_ratio": Bar(most=2),
    "engine.soak.requests": Bar(least=10_000),
    "engine.soak.lost": Bar(most=0),
    "engine.soak.memory_drift": Bar(most=0.02),
    "engine.soak.memory_spread": Bar(),
    "engine.soak.resident_drift": Bar(),
    "engine.soak.leaked_kv_bytes": Bar(most=0),
    "engine.soak.preemptions": Bar(least=100),
    "engine.soak.prefix_hits": Bar(least=100),
    "engine.soak.failed_in_step": Bar(least=10),
    "engine.soak.failed_besides": Bar(most=0),
    "engine.soak.next_request_seconds": Bar(most=1),
    "engine.soak.traces": Bar(),
    "engine.soak.traces_over_buckets": Bar(most=1),
    "offpolicy.max_lag": Bar(most=1),
    "offpolicy.k1_speedup": Bar(least=1.2),
    "memory.learner_over_base": Bar(most_figure="memory.learner_over_base_bar"),
    "trl.samples_to_80_ratio": Bar(most=1),
    "head.memory_ratio": Bar(most=0.1, needs_gpu=True),
    "update.8b.peak_gb": Bar(most=60, needs_gpu=True),
    "update.8b.vs_mlx_lm": Bar(least=1.3, needs_gpu=True),
    "update.8b.vs_torch_peft": Bar(least=1, needs_gpu=True),
    "update.prompt_sharing_gain": Bar(least=1.5, needs_gpu=True),
    "grpo_step.vs_trl_gpu": Bar(least=3, needs_gpu=True),
    "engine.gpu.8b.b1.vs_floor": Bar(most=1.4, needs_gpu=True),
    "engine.gpu.8b.b32.vs_floor": Bar(most=1.75, needs_gpu=True),
    "engine.gpu.8b.b128.vs_batchgenerator": Bar(least=2.1, needs_gpu=True),
    "engine.gpu.05b.b1.vs_batchgenerator": Bar(least=1.3, needs_gpu=True),
    "engine.gpu.05b.b128.vs_batchgenerator": Bar(least=1.8, needs_gpu=True),
    "engine.gpu.8b.lora.vs_base": Bar(least=0.82, needs_gpu=True),
    "engine.gpu.8b.lora8.vs_base": Bar(least=0.7, needs_gpu=True),
    "engine.gpu.mixed.vs_batchgenerator": Bar(least=2, needs_gpu=True),
    "engine.group.prompt_tokens_ratio": Bar(most=1 / 7, needs_gpu=True),
    "engine.sampling16.vs_greedy": Bar(most=1.15, needs_gpu=True),
    "engine.penalties16.vs_greedy": Bar(),
    "engine.join.vs_step": Bar(most=0.05, needs_gpu=True),
}
BAD = ("FALLS SHORT", "NOT MEASURED")
SEEDS = (0, 1, 2)
NOT_EXACT = ("parity.bit_equal_fraction", "parity.strict_speed_ratio")
"""Figures of MKL's strict mode (`parity.strict` is 1); elsewhere the bounds on differences hold alone."""


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=os.environ.get("PARALLM_MODEL"), help="a local folder (PARALLM_MODEL)")
    parser.add_argument("--data", default=os.environ.get("PARALLM_GSM8K"), help="GSM8K as jsonl (PARALLM_GSM8K)")
    parser.add_argument(
        "--only",
        nargs="*",
        help="intervals mutants oracles presets quickstart gsm8k parity engine http servers quantized speculation "
        "learner serving split live kills server hostile soak clients verifiers atropos offpolicy memory trl update "
        "grpo_gpu engine_gpu",
    )
    parser.add_argument(
        "--torch-python",
        default=os.environ.get("PARALLM_TORCH_PYTHON", sys.executable),
        help="an interpreter with torch, trl and peft for a GPU (PARALLM_TORCH_PYTHON)",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: do the scripts run? Bars mean nothing then")
    arguments = parser.parse_args()
    arguments.model = arguments.model and absolute(arguments.model)
    arguments.data = arguments.data and absolute(arguments.data)
    figures: Figures = {}
    failures: list[str] = []
    gpu = has_gpu()
    chosen = measurements(arguments, gpu)
    if unknown := set(arguments.only or ()) - chosen.keys():
        parser.error(f"--only: {', '.join(sorted(unknown))}; choices here: {', '.join(chosen)}")
    for name, measure in chosen.items():
        if arguments.only and name not in arguments.only:
            continue
        print(f"== {name}", flush=True)
        try:
            figures |= measure()
        except Exception:  # noqa: BLE001  # whatever it was, the others are measured and the table is printed
            traceback.print_exc()
            failures.append(name)
    has_model = bool(arguments.model and arguments.data)
    short = judge(figures, has_model=has_model, has_gpu=gpu, is_whole=not arguments.only)
    print_figures(figures)
    for name in failures:
        print(f"not measured: {name}", file=sys.stderr)
    return 1 if short or failures else 0


def has_gpu() -> bool:
    """Whether MLX computes on an NVIDIA GPU here. Asked in another process: this one never loads MLX."""
    question = "import mlx.core as mx; print(mx.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False)
    return done.stdout.strip() == "True"


def measurements(arguments: Namespace, gpu: bool) -> dict[str, Callable[[], Figures]]:
    """Name -> what measures it, in the order of running."""
    options = [f"--model={arguments.model}"] if arguments.model else []
    with_data = [*options, *([f"--data={arguments.data}"] if arguments.data else [])]

    def sized(*small: str) -> list[str]:
        return list(small) if arguments.quick else []

    steps = ["trainer.steps=2", "trainer.evaluate_problems=64"] if arguments.quick else []
    found: dict[str, Callable[[], Figures]] = {
        "intervals": partial(script, "check_intervals.py", *sized("--quick")),
        "mutants": partial(script, "check_mutants.py", *sized("--only=checkpoint")),
        "oracles": partial(script, "check_learner.py"),
        "presets": partial(script, "check_learner.py", "--presets", *sized("grpo", "--seeds=1")),
        "parity": partial(
            script,
            "check_parity.py",
            *with_data,
            *(["--packed-tokens=0"] if gpu else []),  # MLX's CUDA build has no 8-bit keys and values
            *sized("--tokens=1000", "--rounds=1"),
        ),
        "memory": partial(script, "check_memory.py", *with_data),
        "engine": partial(
            script,
            "bench_engine.py",
            *with_data,
            *sized("--prompts=8", "--max-tokens=32", "--rounds=1", "--stock-prompts=2"),
        ),
        "http": partial(script, "bench_http.py", *with_data, *sized("--clients=4", "--max-tokens=32", "--rounds=1")),
        "servers": partial(script, "bench_servers.py", *with_data, *sized("--clients=2", "--seconds=3", "--rounds=1")),
        "quantized": partial(
            script, "bench_quantized.py", *with_data, *sized("--prompts=2", "--peer-prompts=1", "--rounds=1")
        ),
        "speculation": partial(
            script,
            "bench_speculation.py",
            *with_data,
            *sized("--prompts=2", "--max-tokens=32", "--rounds=1", "--rows=1"),
        ),
        "learner": partial(
            script,
            "bench_learner.py",
            *with_data,
            *sized("--prompts=4", "--max-tokens=32", "--rounds=1", "--repeats=1"),
        ),
        "serving": partial(script, "bench_serving.py", *with_data, *sized("--seconds=5", "--publishes=100")),
        "split": partial(script, "check_split.py", *sized("--requests=200")),
        "live": partial(script, "check_live.py", *sized("--completions=80")),
        "kills": partial(script, "check_kills.py", *sized("--kills=2", "--serve-kills=1")),
        "server": partial(
            script,
            "check_server.py",
            *options,
            *sized("--minutes=0.2", "--clients=20", "--bodies=200", "--examples=1", "--requests=4000"),
        ),
        "hostile": partial(script, "check_hostile.py", *sized("--sockets=100")),
        "soak": partial(script, "check_soak.py", *sized("--requests=500", "--rounds=10")),
        "clients": partial(script, "check_clients.py"),
        "verifiers": partial(script, "check_verifiers.py", *options, *sized("--steps=2", "--only=word-sums")),
        "atropos": partial(
            script,
            "check_atropos.py",
            *with_data,
            *sized("--seeds=1", "--steps=16"),
        ),
        "offpolicy": partial(script, "check_offpolicy.py", *sized("--steps=10", "--speed-steps=4", "--rounds=1")),
        "quickstart": partial(quickstart, steps),
        "trl": partial(script, "compare_trl.py", *sized("--seeds=1", "--steps=2", "--problems=64")),
    }
    if gpu:
        python = f"--torch-python={arguments.torch_python}"
        found["update"] = partial(script, "bench_update.py", python, *sized("--shape=tiny", "--length=128"))
        found["grpo_gpu"] = partial(script, "bench_grpo_gpu.py", python, *sized("--shape=tiny", "--steps=1"))
        found["engine_gpu"] = partial(script, "bench_engine_gpu.py", *sized("--quick"))
    if arguments.model and arguments.data:
        found["gsm8k"] = partial(gsm8k, arguments.model, arguments.data, steps)
    return found


def script(name: str, *options: str) -> Figures:
    """Run a measuring script, show what it prints, and return its figures."""
    figures: Figures = last_json(shown([sys.executable, str(SCRIPTS / name), *options]))["figures"]
    return figures


def quickstart(overrides: Sequence[str]) -> Figures:
    """The worst of three seeds, and the change of accuracy of a run that does not learn."""
    runs = [trained(str(SCRIPTS / "quickstart"), [f"seed={seed}", *overrides], "quickstart") for seed in SEEDS]
    control = trained(str(SCRIPTS / "quickstart"), ["seed=0", "learner.learning_rate=0", *overrides], "quickstart")
    worst: Mapping[str, Callable[[list[float]], float]] = {
        "quickstart.accuracy_before": max,
        "quickstart.accuracy_after": min,
        "quickstart.train_seconds": max,
        "quickstart.peak_memory_gb": max,
    }
    figures: Figures = {name: choose([number(run, name) for run in runs]) for name, choose in worst.items()}
    change = number(control, "quickstart.accuracy_after") - number(control, "quickstart.accuracy_before")
    return figures | {"quickstart.control_change": change}


def gsm8k(model: str, data: str, overrides: Sequence[str]) -> Figures:
    command = [f"model.path={model}", f"environment.path={data}", "environment.limit=16", "learner.learning_rate=5e-4"]
    figures = trained("train", ["+recipe=gsm8k_grpo", *command, "trainer.steps=12", *overrides], "gsm8k")
    rise = number(figures, "gsm8k.reward_last") - number(figures, "gsm8k.reward_first")
    return figures | {"gsm8k.reward_rise": rise}


def trained(program: str, overrides: Sequence[str], prefix: str) -> Figures:
    """Train in a run folder of its own name and return the figures of its summary.json."""
    start = [sys.executable, "-m", "parallm.train"] if program == "train" else [program]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        shown(
            [
                *start,
                *overrides,
                f"metrics.figures={prefix}",
                "metrics.display=lines",
                "server.port=0",
                f"hydra.run.dir={run}",
            ]
        )
        summary = json.loads((run / "summary.json").read_text())
    figures: Figures = summary["figures"]
    return figures


def shown(command: Sequence[str]) -> str:
    """Run a program and print its output as it comes. Raises subprocess.CalledProcessError if it fails."""
    print(f"$ {' '.join(command)}", flush=True)
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=clean_environment(), cwd=SCRIPTS.parent
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, list(command))
    return "".join(lines)


def number(figures: Figures, name: str) -> float:
    """Raises ValueError if the run could not tell this figure."""
    value = figures.get(name)
    if value is None:
        raise ValueError(f"{name} is missing in the run's summary.json")
    return value


def judge(figures: Figures, *, has_model: bool, has_gpu: bool, is_whole: bool) -> list[str]:
    """Print all figures beside their bars; return those that fall short. If `is_whole`, none may be missing."""
    rows: list[tuple[str, str, str, str]] = [("figure", "value", "bar", "")]
    short: list[str] = []
    for name in sorted(figures.keys() | BARS.keys()):
        value, bar = figures.get(name), BARS.get(name, Bar()).with_bounds(figures)
        is_here = (has_model or not bar.needs_model) and (has_gpu or not bar.needs_gpu)
        holds = is_here and (figures.get("parity.strict", 1) == 1 or name not in NOT_EXACT)
        is_due = is_whole and not bar.is_optional
        verdict = _verdict(value, bar, is_asked=holds and (is_due or value is not None))
        if verdict in BAD:
            short.append(name)
        rows.append((name, "-" if value is None else f"{value:.4g}", bar.text(), verdict))
    print_table("Figures", rows)
    return short


def _verdict(value: float | None, bar: Bar, *, is_asked: bool) -> str:
    if not bar.is_bar:
        return ""
    if not is_asked:
        return "not judged here"
    if value is None or not bar.text():
        return "NOT MEASURED"
    return "ok" if bar.is_met(value) else "FALLS SHORT"


if __name__ == "__main__":
    sys.exit(main())
