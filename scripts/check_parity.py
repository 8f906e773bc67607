"""Are the engine's log-probs those that the learner computes? Samples under ragged continuous batching with LoRA on.

Prints how many are equal bit for bit, the mean and the largest difference and the KL between both (its estimate k3),
for the nano model and for --model; the reference BLAS as control; the same with 8-bit keys and values, which are those
of another policy; and the speed of MKL's strict mode relative to the same without it.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from job import Job, add_model_options, base_job, run_worker
from report import print_figures, print_table

ROWS = 48
"""Fewer than there are completions, so that rows join whenever others leave."""


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add_model_options(parser)
    parser.add_argument("--dtype", default="auto", help="model.dtype (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=10_000, help="sampled tokens to compare (default: %(default)s)")
    parser.add_argument("--control-tokens", type=int, default=1_000, help="with the reference BLAS; 0: leave it out")
    parser.add_argument("--packed-tokens", type=int, default=2_000, help="with engine.kv_bits=8; 0: leave it out")
    parser.add_argument("--rounds", type=int, default=3, help="of the speed comparison; 0: leave it out")
    arguments = parser.parse_args()
    job = replace(base_job(arguments), tokens=arguments.tokens, rows=ROWS, lora=True, dtype=arguments.dtype)
    jobs = {"nano": replace(job, model="nano", data=None)}
    if arguments.model != "nano":
        jobs[arguments.model] = job
    found = {name: run_worker("parity", one) for name, one in jobs.items()}
    rows = [row(name, one) for name, one in found.items()]
    if arguments.control_tokens and arguments.blas != "reference":
        control = run_worker("parity", replace(job, blas="reference", tokens=arguments.control_tokens))
        rows.append(row(f"{arguments.model}, control", control))
    packed: dict[str, Any] = {}
    if arguments.packed_tokens:
        packed = run_worker("parity", replace(job, tokens=arguments.packed_tokens, kv_bits=8))
        rows.append(row(f"{arguments.model}, engine.kv_bits=8", packed))
    print_table(
        "Log-probs of engine and learner", [("model", "BLAS", "tokens", "bit-equal", "mean", "max", "KL"), *rows]
    )
    first = next(iter(found.values()))
    is_strict_mkl = first["blas"] == "mkl" and first["strict"]
    ratio = speed_ratio(replace(job, rows=128), arguments.rounds) if is_strict_mkl and arguments.rounds else None
    figures = worst(list(found.values())) | {
        "parity.strict_speed_ratio": ratio,
        "parity.kv_bits8.mean_abs": packed.get("mean_abs"),
        "parity.kv_bits8.max_abs": packed.get("max_abs"),
    }
    print_figures(figures, device=device(first))


def row(name: str, found: dict[str, Any]) -> tuple[str, ...]:
    equal = f"{found['bit_equal_fraction']:.6f}"
    sizes = (f"{found[size]:.1e}" for size in ("mean_abs", "max_abs", "kl"))
    return name, device(found), str(found["tokens"]), equal, *sizes


def device(found: dict[str, Any]) -> str:
    return f"{found['blas']}{', strict' if found['strict'] else ''}"


def worst(found: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """The figures of the model that does worst; tokens are those of all."""
    return {
        "parity.bit_equal_fraction": min(one["bit_equal_fraction"] for one in found),
        "parity.max_abs": max(one["max_abs"] for one in found),
        "parity.mean_abs": max(one["mean_abs"] for one in found),
        "parity.kl": max(one["kl"] for one in found),
        "parity.tokens": min(one["tokens"] for one in found),
        "parity.strict": float(all(one["strict"] for one in found)),
    }


def speed_ratio(job: Job, rounds: int) -> float:
    """Speed of rollout and update in strict mode over that without it: medians of alternating processes."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    one_step = replace(job, prompts=8, max_tokens=64, repeats=2)
    for _ in range(rounds):
        for strict in (True, False):
            found = run_worker("step_speed", replace(one_step, strict=strict))
            seconds[strict].append(found["rollout"] + found["update"])
    rows = [("mode", "median", "all")]
    for strict, name in ((True, "strict"), (False, "not strict")):
        rows.append((name, f"{median(seconds[strict]):.2f}", " ".join(f"{one:.2f}" for one in seconds[strict])))
    print_table("Seconds of a rollout (64 completions of 64 tokens) and its update", rows)
    return median(seconds[False]) / median(seconds[True])


if __name__ == "__main__":
    main()
