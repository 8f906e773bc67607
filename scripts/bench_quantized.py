"""Quantized bases against the same base in full precision: prefill, decode, an update, memory; and BatchGenerator.

The base is converted as `mlx_lm.convert -q` does, in groups of 64. `unpacked` and `packed` are the choices of
model.quantized. Rounds go through all of them in turns, each in a fresh process. BatchGenerator of mlx-lm has the same
quantized model and BLAS, and fewer prompts where a token takes it long: its products take as long a row whatever their
number. In full precision `bench_engine.py` compares the two. Peaks are of MLX's arrays: of prefill and decode, and of
the update.
"""

import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from job import Job, add_model_options, base_job, blas_name, clean_environment, run_program, run_worker
from report import print_figures, print_table

import parallm

Found = dict[str, list[dict[str, float]]]
FULL = "full precision"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add_model_options(parser)
    parser.add_argument("--bits", type=int, nargs="*", default=[8, 4], help="default: 8 4")
    parser.add_argument("--prompts", type=int, default=8, help="problems, 8 completions each (default: %(default)s)")
    parser.add_argument("--peer-prompts", type=int, default=2, help="for BatchGenerator; 0: leave it out (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of a completion (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    arguments = parser.parse_args()
    job = replace(base_job(arguments), prompts=arguments.prompts, max_tokens=arguments.max_tokens)
    with tempfile.TemporaryDirectory() as folder:
        jobs = jobs_of(job, arguments.bits, Path(folder))
        found: Found = {name: [] for name in jobs}
        for _ in range(arguments.rounds):
            for name, one in jobs.items():
                found[name].append(run_worker("quantized_speed", one))
        peers = peer_speeds(jobs, arguments.peer_prompts) if arguments.peer_prompts else {}
    header = ("", "decode tok/s", "BatchGenerator", "prefill tok/s", "update s", "base MB", "peak MB", "update peak MB")
    print_table(f"Quantized: {arguments.model}", [header, *(row(name, found, peers) for name in found)])
    print_figures(figures_of(found, peers), device=blas_name(job))


def jobs_of(job: Job, bits: list[int], folder: Path) -> dict[str, Job]:
    jobs = {FULL: job}
    for count in bits:
        path = folder / f"{count}_bits"
        source = str(Path(parallm.__file__).parent / "model" / "nano") if job.model == "nano" else job.model
        options = ["--hf-path", source, "--mlx-path", str(path), "-q", "--q-bits", str(count), "--q-group-size", "64"]
        run_program([sys.executable, "-m", "mlx_lm", "convert", *options], clean_environment())
        jobs |= {f"{count} bits, {how}": replace(job, model=str(path), quantized=how) for how in ("unpacked", "packed")}
    return jobs


def peer_speeds(jobs: Mapping[str, Job], prompts: int) -> dict[str, float]:
    """BatchGenerator's tokens/s, by the name of ours on the same base."""
    speeds: dict[str, float] = {}  # by folder: it knows one way to keep weights
    for name, one in jobs.items():
        if name != FULL and one.model not in speeds:
            fewer = replace(one, prompts=prompts, rows=min(one.rows, prompts * one.group_size))
            speeds[one.model] = run_worker("batch_generator_speed", fewer, peer=True)["tokens_per_second"]
    return {name: speeds[one.model] for name, one in jobs.items() if one.model in speeds}


def middle(name: str, what: str, found: Found) -> float:
    return median(one[what] for one in found[name])


def row(name: str, found: Found, peers: Mapping[str, float]) -> tuple[str, ...]:
    speeds = f"{middle(name, 'decode', found):.0f}", f"{peers[name]:.0f}" if name in peers else "-"
    others = f"{middle(name, 'prefill', found):.0f}", f"{middle(name, 'update', found):.2f}"
    memory = (f"{middle(name, what, found) / 1e6:.1f}" for what in ("base_bytes", "engine_peak", "update_peak"))
    return name, *speeds, *others, *memory


def figures_of(found: Found, peers: Mapping[str, float]) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    for name in (name for name in found if name != FULL):
        prefix = f"quantized.{name.replace(' bits, ', 'bit_')}"
        for what in ("decode", "prefill", "base_bytes"):
            figures[f"{prefix}.{what}_vs_full"] = middle(name, what, found) / middle(FULL, what, found)
        figures[f"{prefix}.update_speed_vs_full"] = middle(FULL, "update", found) / middle(name, "update", found)
        figures[f"{prefix}.vs_batchgenerator"] = middle(name, "decode", found) / peers[name] if name in peers else None
    return figures


if __name__ == "__main__":
    main()
