"""Are the numbers of the engine those of the learner, and is no token older than allowed?"""

from collections.abc import Iterator, Mapping
from math import exp, hypot, log
from statistics import mean, median, stdev
from typing import Any

from bench.compare import in_turns, print_table, ratio
from bench.measurement import Bar, Figures, Request, has_gpu, measurement
from bench.processes import blas_name, work, work_in_parts

COLUMNS = ("blas", "strict", "dtype", "tokens", "bit_equal_fraction", "mean_abs", "max_abs", "kl")
SIZES = ("mean_abs", "max_abs", "kl")
TYPES = ("auto", "bfloat16")


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

    The figures are those of the model that does worst. The reference BLAS is shown as a control.
    """
    tokens = request.size(10_000, 1000)
    found = {"nano": work("parity", model="nano", data=None, tokens=tokens)}
    if request.model != "nano":
        found[request.model] = work("parity", model=request.model, data=request.data, tokens=tokens)
    results = list(found.values())
    if not has_gpu():
        found["nano, control"] = work("parity", model="nano", data=None, tokens=1000, blas="reference")
    show_parity(found)
    return {
        "parity.bit_equal_fraction": min(one["bit_equal_fraction"] for one in results),
        **{f"parity.{size}": max(one[size] for one in results) for size in SIZES},
        "parity.tokens": min(one["tokens"] for one in results),
        "parity.strict": float(all(one["strict"] for one in results)),
    }


@measurement({f"parity.bfloat16.{size}": Bar() for size in SIZES}, minutes=1, needs="gpu")
def parity_bfloat16(request: Request) -> Figures:
    found = work("parity", model="nano", data=None, tokens=request.size(10_000, 1000), dtype="bfloat16")
    show_parity({"nano, bfloat16": found})
    return {f"parity.bfloat16.{size}": found[size] for size in SIZES}


@measurement(
    {
        "gpu.parity.mathling_k3": Bar(max=5e-5, needs="gpu model"),
        "gpu.parity.mathling_1024_rows_k3": Bar(max=5e-5, needs="gpu model"),
        "gpu.parity.mathling_bfloat16_k3": Bar(),
        "gpu.parity.0.5b_k3": Bar(max=1e-4, needs="gpu"),
        "gpu.parity.0.5b_bfloat16_k3": Bar(),
        "gpu.parity.qwen3.5-0.8b_k3": Bar(),
    },
    minutes=3,
    needs="gpu",
    is_quick_anywhere=True,
)
def parity_on_gpu(request: Request) -> Iterator[Figures]:
    """k3 of a trained model and of random weights at 4,096 tokens, as they are computed by default, which `dtype`
    shows, and in bfloat16; of a hybrid's random weights at 1,024 tokens."""
    shape = {"shape": "0.5b", "tokens": 32_768, "length": 4096}
    hybrid = {"shape": "qwen3.5-0.8b", "tokens": 16_384, "length": 1024}
    if request.is_quick:
        shape = {"shape": "tiny", "tokens": 512, "length": 64}
        hybrid = shape | {"shape": "hybrid-tiny"}
    jobs: dict[str, dict[str, Any]] = {
        "0.5b": {"dtype": "float16", **shape},
        "0.5b_bfloat16": {"dtype": "bfloat16", **shape},
        "qwen3.5-0.8b": {"dtype": "float16", **hybrid},
    }
    if request.model != "nano":
        model = {"model": request.model, "data": request.data, "tokens": request.size(10_000, 1000)}
        jobs["mathling"] = model
        jobs["mathling_1024_rows"] = model | {"rows": 1024}
        jobs["mathling_bfloat16"] = model | {"dtype": "bfloat16"}
    for name, job in jobs.items():
        if request.wants(figure := f"gpu.parity.{name}_k3"):
            found = work("parity", **job)
            show_parity({name: found})
            yield {figure: found["kl"]}


@measurement(
    {
        "gpu.parity.rollout_speed_vs_bfloat16": Bar(min=0.97, needs="gpu model"),
        "gpu.parity.update_speed_vs_bfloat16": Bar(min=0.97, needs="gpu model"),
        "gpu.parity.control_rollout_speed_of_place": Bar(),
        "gpu.parity.control_update_speed_of_place": Bar(),
    },
    minutes=6,
    needs="gpu",
    is_quick_anywhere=True,
)
def precision_speed(request: Request) -> Iterator[Figures]:
    """What agreement costs: tokens/s of steps of 64 problems x 16 in the type of `model.dtype=auto` over bfloat16's.

    Two processes, in which either type is loaded first; the types take turns in each. A step of these sizes takes up
    to a third longer than the next one, so it is their geometric mean over many steps; its standard error is printed.
    The control is what the first place gives, whatever its type.
    """
    sizes = {"prompts": request.size(64, 2), "group_size": request.size(16, 2), "max_tokens": request.size(160, 8)}
    job = {"model": request.model, "data": request.data, **sizes, "steps": request.size(40, 2)}
    logs: dict[str, list[list[float]]] = {"rollout": [], "update": []}
    for types in (TYPES, TYPES[::-1]):
        steps = []
        for step in work_in_parts("precision_speed", is_peer=False, types=types, **job):
            print(f"  {step}", flush=True)
            steps.append(step)
        for what, of_orders in logs.items():
            of_orders.append([log(step["auto"][what] / step["bfloat16"][what]) for step in steps])
    for what, (auto_first, auto_last) in logs.items():
        spread = hypot(stdev(auto_first), stdev(auto_last)) / 2
        print(f"  {what}: standard error {spread / len(auto_first) ** 0.5:.3f}", flush=True)
        yield {
            f"gpu.parity.{what}_speed_vs_bfloat16": exp((mean(auto_first) + mean(auto_last)) / 2),
            f"gpu.parity.control_{what}_speed_of_place": exp((mean(auto_first) - mean(auto_last)) / 2),
        }


def show_parity(found: Mapping[str, Mapping[str, Any]]) -> None:
    rows = [
        (name, *(f"{one[key]:.2g}" if key in SIZES else one[key] for key in COLUMNS)) for name, one in found.items()
    ]
    print_table("Log-probs of engine and learner", [("model", *COLUMNS), *rows])


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
