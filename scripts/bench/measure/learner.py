"""Speed and memory of the learner and of whole GRPO steps, beside mlx-lm-lora, a loop by hand, mlx-lm, PyTorch and TRL.

On a CPU. Update: the same completions for both, all tokens trained on, one optimizer step; mlx-lm-lora runs its own
`train_grpo`. Step: sampling, scoring, update; the same problems, no refill, a learning rate so small that all sample
from the same policy. How many tokens a step samples differs by chance, and on how many it trains by design: we and the
naive loop leave out groups without signal. So steps are compared by the seconds of a token that is sampled and trained
on. mlx-lm-lora is measured with our BLAS, and as `pip install mlx-lm-lora 'mlx[cpu]'` leaves it, with the BLAS of MLX's
wheel: the difference is what a user gets. A step of ours takes that many minutes, so it gets fewer problems, as many
rows at a time as before, and one timed step.

On a GPU. Random weights, bfloat16, LoRA of rank 16 on all linear layers. Every peer looks for the settings with which
it is fastest. Updates run a second time, the other way round, since a GPU that has been busy is slower. mlx-lm runs
twice: with its own loss, which computes logits for prompts, too, and with one that leaves them out, as ours and
PyTorch's do.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.compare import Settings, described, in_turns, print_table, tune
from bench.measurement import Bar, Figures, Request, measurement
from bench.problems import environment_overrides
from bench.processes import NANO, metrics, our_mlx, python_with, train, work
from bench.workers.loads import SHAPES
from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings

MLX_LM_LORA = "mlx-lm-lora==5.10.2"
GROUP_SIZE = 8
LEARNER_ADAPTERS, SHARE_OF_BASE = 6, 0.05
Steps = Mapping[str, Sequence[float]]
"""Seconds, seconds of sampling, sampled and trained tokens of whole steps."""


@measurement(
    {
        "learner.cpu.vs_mlx_lm_lora": Bar(),
        "grpo_step.cpu.vs_mlx_lm_lora": Bar(min=5, needs="model"),
        "grpo_step.cpu.vs_mlx_lm_lora_same_blas": Bar(),
        "grpo_step.cpu.vs_naive": Bar(min=2, needs="model"),
    },
    minutes=20,
)
def learner_cpu(request: Request) -> Figures:
    size, rounds = request.size, request.size(2, 1)
    prompts, repeats = size(16, 4), size(2, 1)
    job: dict[str, Any] = {"data": request.data, "prompts": prompts, "max_tokens": size(160, 32), "repeats": repeats}
    python = python_with(request.peers / "mlx-lm-lora", [MLX_LM_LORA, *our_mlx()])
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "trajectories.json"

        def peer(number: int, *, samples: bool, is_ours: bool = True, **more: Any) -> Any:
            model = str(NANO) if request.model == "nano" else request.model
            keywords = {"model": model, "trajectories": str(file), "rows": prompts, "samples": samples, "seed": number}
            sizes = {key: value for key, value in job.items() if key != "data"}
            blas = our_blas() if is_ours else {"BENCH_BLAS_LIBRARY": ""}
            return work("mlx_lm_lora_speed", is_peer=True, python=python, environment=blas, **sizes | keywords | more)

        ours = partial(work_round, "update_speed", model=request.model, trajectories=str(file), **job)
        updates = in_turns(rounds, {"parallm": ours, "mlx-lm-lora": partial(peer, samples=False)})
        steps = in_turns(
            rounds,
            {
                "parallm": partial(our_steps, request, prompts, job["max_tokens"], repeats, Path(name)),
                "naive loop": partial(work_round, "naive_grpo", is_peer=True, model=request.model, **job),
                "mlx-lm-lora, our BLAS": partial(peer, samples=True),
            },
        )
        steps["mlx-lm-lora as pip installs it"] = [
            peer(0, samples=True, is_ours=False, prompts=min(2, prompts), repeats=1)
        ]
    seconds = {who: median(one for found in rounds for one in found["seconds"]) for who, rounds in updates.items()}
    tokens = {who: seconds_a_token(rounds) for who, rounds in steps.items()}
    print_table("One update", [("", "s"), *seconds.items()])
    rows = [(who, 1e3 * value, value / tokens["parallm"]) for who, value in tokens.items()]
    print_table("One GRPO step", [("", "ms a token", "over ours"), *rows])
    return {
        "learner.cpu.vs_mlx_lm_lora": seconds["mlx-lm-lora"] / seconds["parallm"],
        "grpo_step.cpu.vs_mlx_lm_lora": tokens["mlx-lm-lora as pip installs it"] / tokens["parallm"],
        "grpo_step.cpu.vs_mlx_lm_lora_same_blas": tokens["mlx-lm-lora, our BLAS"] / tokens["parallm"],
        "grpo_step.cpu.vs_naive": tokens["naive loop"] / tokens["parallm"],
    }


def work_round(worker: str, number: int, **keywords: Any) -> dict[str, Any]:
    return work(worker, seed=number, **keywords)


def seconds_a_token(rounds: Sequence[Steps]) -> float:
    """Seconds to sample a completion token, and to train on one."""
    seconds, sampling, sampled, trained = (
        sum(one for found in rounds for one in found[name]) for name in ("seconds", "rollout", "tokens", "trained")
    )
    return sampling / sampled + (seconds - sampling) / trained


def our_steps(request: Request, prompts: int, max_tokens: int, repeats: int, folder: Path, number: int) -> Steps:
    """`python -m parallm.train` as it is, without its first step, which warms up."""
    run = folder / f"run-{number}"
    train(
        run,
        *(f"model.path={request.model}", *environment_overrides(request.data, prompts)),
        *(f"rollout.problems_per_step={prompts}", f"rollout.group_size={GROUP_SIZE}"),
        *(f"rollout.max_tokens={max_tokens}", "rollout.refill_rounds=0", f"seed={number}"),
        *(f"trainer.steps={repeats + 1}", "trainer.evaluate_problems=0", "learner.learning_rate=1e-6"),
        "checkpoint.every=1000",
    )
    names = {"seconds": "seconds/total", "rollout": "seconds/rollout", "tokens": "rollout/tokens"}
    names["trained"] = "update/tokens"
    return {name: [float(row.get(metric, 0)) for row in metrics(run)[1:]] for name, metric in names.items()}


def our_blas() -> dict[str, str]:
    """The variables with which a peer multiplies matrices by our library."""
    report = load_blas(DeviceSettings())  # harmless: this process computes nothing, and it sets MKL_CBWR
    strict = {"MKL_CBWR": os.environ["MKL_CBWR"]} if "MKL_CBWR" in os.environ else {}
    return {"BENCH_BLAS_LIBRARY": str(report.path or "")} | strict


@measurement(
    {
        "memory.learner_over_base": Bar(max_figure="memory.learner_over_base_bar", needs="model"),
        "memory.learner_mb": Bar(),
        "memory.learner_adapters": Bar(max=6.05),
        "memory.growth_by_later_updates": Bar(max=0.02),
        "memory.update_peak_mb": Bar(),
    },
    minutes=1,
)
def memory(request: Request) -> Figures:
    """How much a server grows by a learner that trains: optimizer, new versions, the way back to the last good one.

    Readings are taken between updates, after unused memory was given back. The bar is six adapters (the newest version
    with its two moments, and the same of the version before) and 5% of the base weights. Versions that a server keeps
    for its clients do not count. One heap: malloc cannot give back what lies at the ends of others.
    """
    found = work("memory", environment={"MALLOC_ARENA_MAX": "1"}, model=request.model, data=request.data)
    rows = [(name, " ".join(f"{one / 1e6:.1f}" for one in growth(found[name]))) for name in ("arrays", "allocated")]
    print_table("MB with a learner, and after each update, over those of a server", [("", ""), *rows])
    return memory_figures(found)


def memory_figures(found: Mapping[str, Any]) -> Figures:
    """What the process holds after the last update: live arrays, or all that C code has allocated if that is more."""
    base, adapter, arrays = found["base"], found["adapter"], growth(found["arrays"])
    held = max(arrays[-1], growth(found["allocated"])[-1])
    return {
        "memory.learner_over_base": held / base,
        "memory.learner_over_base_bar": SHARE_OF_BASE + LEARNER_ADAPTERS * adapter / base,
        "memory.learner_mb": held / 1e6,
        "memory.learner_adapters": arrays[-1] / adapter,
        "memory.growth_by_later_updates": arrays[-1] / arrays[2] - 1,  # later ones than the first two
        "memory.update_peak_mb": (found["peak_of_updates"] - found["peak"]) / 1e6,
    }


def growth(readings: Sequence[int]) -> list[int]:
    """Over the first reading, of a server without a learner."""
    return [size - readings[0] for size in readings[1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of the comparison of updates."""

    worker: str
    figure: str
    """The end of its name: its seconds over ours."""
    settings: Settings | None = None
    """Those that it does not choose by itself."""
    needs_torch: bool = False


UPDATES = {
    "mlx-lm": Side(worker="mlx_lm_update", settings={"head": "all"}, figure="vs_mlx_lm"),
    "mlx-lm, head for completions": Side(
        worker="mlx_lm_update", settings={"head": "completions"}, figure="vs_mlx_lm_same_head"
    ),
    "PyTorch + PEFT": Side(worker="torch_update", figure="vs_torch_peft", needs_torch=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateLoad:
    """Rows of one shape."""

    shape: str
    rows: int
    passes: tuple[int, ...]
    """Rows of a pass that peers try."""


UPDATE_LOADS = {
    "8b": UpdateLoad(shape="8b", rows=16, passes=(4, 1, 2, 8)),
    "05b": UpdateLoad(shape="0.5b", rows=64, passes=(16, 4, 8, 32)),
}
SHARING = "update.prompt_sharing_gain"


@measurement(
    {
        **{f"update.{load}.vs_mlx_lm": Bar(min=1.3, needs="gpu") for load in UPDATE_LOADS},
        **{f"update.{load}.vs_mlx_lm_same_head": Bar() for load in UPDATE_LOADS},
        **{f"update.{load}.vs_torch_peft": Bar(min=1, needs="gpu") for load in UPDATE_LOADS},
        **{f"update.{load}.peak_gb": Bar(max=60, needs="gpu") for load in UPDATE_LOADS},
        SHARING: Bar(min=1.5, needs="gpu"),
    },
    minutes=15,
    needs="gpu",
)
def updates(request: Request) -> Iterator[Figures]:
    """Rows of 512 prompt and 512 completion tokens. Sharing: those of 8B as groups of 8 with one prompt each."""
    for name, load in UPDATE_LOADS.items():
        figures = {who: f"update.{name}.{side.figure}" for who, side in UPDATES.items()}
        peers = {who: UPDATES[who] for who, figure in figures.items() if request.wants(figure)}
        shares = name == "8b" and request.wants(SHARING)
        if not (peers or shares or request.wants(f"update.{name}.peak_gb")):
            continue
        shape, half = ("tiny", 64) if request.is_quick else (load.shape, 512)
        job = {"shape": shape, "groups": load.rows, "group_size": 1, "prompt": half, "completion": half}
        ours = attempt("parallm_update", **job)
        found = {who: update_of(side, request, job, load, None) for who, side in peers.items()}
        for who, side in reversed(peers.items()):
            if one := found[who]:
                again = update_of(side, request, job, load, one["settings"])
                one["seconds"] += again["seconds"] if again else []
        if not ours:
            yield {figures[who]: None for who in peers}
            continue
        ours["seconds"] += attempt("parallm_update", **job)["seconds"]
        rows = [(who, median(one["seconds"]), described(one["settings"])) for who, one in found.items() if one]
        rows.append(("parallm", median(ours["seconds"]), "defaults"))
        print_table(f"One update: {shape}, {load.rows} x {2 * half} tokens", [("", "median s", "settings"), *rows])
        yield {
            figures[who]: median(one["seconds"]) / median(ours["seconds"]) if one else None
            for who, one in found.items()
        } | {f"update.{name}.peak_gb": ours["peak_gb"]}
        if shares:
            shared = attempt("parallm_update", **job | {"groups": load.rows // GROUP_SIZE, "group_size": GROUP_SIZE})
            yield {SHARING: median(ours["seconds"]) / median(shared["seconds"]) if shared else None}


def update_of(
    side: Side, request: Request, job: Mapping[str, Any], load: UpdateLoad, settings: Settings | None
) -> dict[str, Any]:
    """With the given settings, or those that it finds to be best."""
    python = request.torch_python if side.needs_torch else sys.executable
    own = {"settings": settings or side.settings, "passes": load.passes}
    return attempt(side.worker, is_peer=True, python=python, environment={"BENCH_BLAS_LIBRARY": ""}, **job, **own)


def attempt(worker: str, **keywords: Any) -> dict[str, Any]:
    """Nothing where it fails, for want of memory, say."""
    try:
        done = work(worker, **keywords)
    except RuntimeError as error:
        print(f"  {worker} failed: {str(error)[-600:]}", flush=True)
        return {}
    print(f"  {worker}: {done}", flush=True)
    return done


GRPO_PARTS = ("seconds", "sampling", "scoring", "update")


@measurement({"grpo_step.vs_trl_gpu": Bar(min=3, needs="gpu")}, minutes=6, needs="gpu")
def grpo_gpu(request: Request) -> Figures:
    """A whole step (sample, score, update, publish) of 16 x 8 completions: `parallm.train` beside TRL's GRPOTrainer.

    Both load the same random weights. Every completion has the full length, since no side can sample the end token.
    TRL samples with transformers, all completions of a step in one batch; with vLLM it would sample faster.
    """
    shape = "tiny" if request.is_quick else "0.5b"
    sizes = {"prompts": 16, "group_size": 8, "prompt": 128, "completion": 256}
    torch = {"python": request.torch_python, "environment": {"BENCH_BLAS_LIBRARY": "", "HF_HUB_OFFLINE": "1"}}
    with tempfile.TemporaryDirectory() as model:
        work("random_checkpoint", **torch, folder=model, config=SHAPES[shape])
        job = {"model": model, "vocabulary": SHAPES[shape]["vocab_size"], **sizes}
        trl = {"rows": (128, 64, 32), "generation": ("plain", "static", "continuous")}
        found = {
            "parallm": fastest("grpo_steps", job, {"rows": (16, 64)}, {}),
            "TRL": fastest("trl_grpo_steps", job, trl, torch),
        }
    rows = [
        (who, *(median(one[part]) for part in GRPO_PARTS), one["peak_gb"] or "-", described(one["settings"]))
        for who, one in found.items()
        if one
    ]
    print_table(f"One GRPO step: {shape}", [("", *GRPO_PARTS, "peak GB", "settings"), *rows])
    ours, peer = (one and median(one["seconds"]) for one in found.values())
    return {"grpo_step.vs_trl_gpu": peer / ours if ours and peer else None}


def fastest(
    worker: str, job: Mapping[str, Any], choices: Mapping[str, Sequence[Any]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """A run of three steps after two that warm up, with the settings that were fastest in shorter runs."""

    def run(settings: Settings, warm_up: int, steps: int) -> dict[str, Any]:
        done = attempt(worker, **options, **job, **settings, warm_up=warm_up, steps=steps)
        expected = job["prompts"] * job["group_size"] * job["completion"]
        if done and set(done["sampled_tokens"]) != {expected}:
            raise ValueError(f"{worker}: {done['sampled_tokens']} sampled tokens, expected {expected} in each step")
        return done

    def seconds_of(settings: Settings) -> float | None:
        done = run(settings, 1, 1)
        return median(done["seconds"]) if done else None

    best = tune({name: values[0] for name, values in choices.items()}, choices, seconds_of)[0]
    return run(best.settings, 2, 3) | {"settings": best.settings} if best.seconds else {}
