"""A base that is divided between the GPUs of a host: decode steps over those of one GPU, and the sums between them."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.compare import print_table
from bench.measurement import Bar, Figures, Request, has_gpu, measurement, num_gpus
from bench.processes import clean_environment, worker_command
from parallm.distributed.gang import free_ports, ring_hosts, variables
from parallm.distributed.launcher import devices

HOST = "127.0.0.1"
SIZES = (2, 4)
ROWS = (1, 32)
BARS = {2: 1.5, 4: 2.5}
SECONDS = 150.0
"""Limit of the processes of one size. MLX compiles its packed products in 32 of them, once on a machine."""


@measurement(
    {
        **{f"tensor_parallel.70b_4bit_{size}": Bar(min=BARS[size], needs=f"gpus{size}") for size in SIZES},
        **{f"tensor_parallel.70b_4bit_{size}_b{rows}": Bar() for size in SIZES for rows in ROWS},
        "tensor_parallel.logit_difference": Bar(max=1e-2, needs="gpus2"),
        "tensor_parallel.control_logit_difference": Bar(min=5e-2, needs="gpus2"),
        "tensor_parallel.start_seconds": Bar(max=60, needs="gpus2"),
    },
    minutes=5,
    needs="gpus2",
    is_quick_anywhere=True,
)
def divided_steps(request: Request) -> Iterator[Figures]:
    """A 70B shape in 4 bits, random weights: decode steps of 1 and 32 rows on one GPU over those on several, the worse
    of both; RMS of the difference between the logits of two and of one, and of a prompt with another end; seconds
    until two have their parts."""
    shape, layers = ("tiny", 2) if request.is_quick else ("70b-4bit", 80)
    rows = [1, 4] if request.is_quick else list(ROWS)
    with tempfile.TemporaryDirectory() as folder:
        job = {"shape": shape, "layers": layers, "rows": rows, "new": request.size(48, 8), "folder": folder}
        found = {1: run("tensor_parallel_steps", 1, Path(folder), job)}
        for size in [size for size in SIZES if size == 2 or size <= num_gpus()]:
            found[size] = run("tensor_parallel_steps", size, Path(folder), job)
            show(found)
            yield step_figures(size, found)
            if size == 2:
                one, two, other = (
                    np.load(Path(folder) / name) for name in ("logits_1.npy", "logits_2.npy", "other_logits_2.npy")
                )
                difference, control, spread = rms(two - one), rms(other - one), float(one.std())
                print(
                    f"logits: standard deviation {spread:.4f}; two GPUs differ by {difference:.5f}, "
                    f"{difference / spread:.4f} of it, the control by {control:.5f}, {control / spread:.4f} of it",
                    file=sys.stderr,
                )
                yield {
                    "tensor_parallel.logit_difference": difference,
                    "tensor_parallel.control_logit_difference": control,
                    "tensor_parallel.start_seconds": found[2][0]["start_seconds"],
                }


@measurement(
    {
        "tensor_parallel.sum_b1_us": Bar(),
        "tensor_parallel.sum_b32_us": Bar(),
        "tensor_parallel.nccl_sum_b1_us": Bar(),
        "tensor_parallel.nccl_sum_b32_us": Bar(),
        "tensor_parallel.sum_vs_nccl": Bar(min=1, needs="gpus2"),
    },
    minutes=1,
    needs="gpus2",
    is_quick_anywhere=True,
)
def sums(request: Request) -> Figures:
    """A sum of 8,192 bfloat16 numbers of each row over two GPUs, in a chain of 160, by our kernel and by NCCL; the
    multiplication between two sums counts."""
    with tempfile.TemporaryDirectory() as folder:
        job = {"rows": list(ROWS), "hidden": request.size(8192, 64), "folder": folder}
        [found] = run("sum_speed", 2, Path(folder), job)
    microseconds = {name: 1e6 * one["seconds"] for name, one in found.items()}
    for name, one in found.items():
        print(f"{name}: {microseconds[name]:.1f} us, of the host {1e6 * one['host_seconds']:.1f} us", file=sys.stderr)
    return sum_figures(microseconds)


def rms(difference_TV: np.ndarray) -> float:
    return float(np.sqrt(np.square(difference_TV).mean()))


def sum_figures(microseconds: Mapping[str, float]) -> Figures:
    """`microseconds`: by kind and rows. Ranks without GPUs have no kernel."""
    figures: Figures = {}
    for rows in ROWS:
        figures[f"tensor_parallel.sum_b{rows}_us"] = microseconds.get(f"kernel.{rows}")
        figures[f"tensor_parallel.nccl_sum_b{rows}_us"] = microseconds.get(f"group.{rows}")
    if "kernel.1" in microseconds:
        ratios = [microseconds[f"group.{rows}"] / microseconds[f"kernel.{rows}"] for rows in ROWS]
        figures["tensor_parallel.sum_vs_nccl"] = min(ratios)
    return figures


def step_figures(size: int, found: Mapping[int, Sequence[Mapping[str, Any]]]) -> Figures:
    """`found`: what rank 0 has told, by the number of ranks."""
    one, many = ([part["seconds"] for part in found[count] if "rows" in part] for count in (1, size))
    ratios = [whole / divided for whole, divided in zip(one, many, strict=True)]
    name = f"tensor_parallel.70b_4bit_{size}"
    own = {f"{name}_b{rows}": ratio for rows, ratio in zip(ROWS, ratios, strict=True)}
    return {name: min(ratios), **own}


def show(found: Mapping[int, Sequence[Mapping[str, Any]]]) -> None:
    rows: list[Sequence[object]] = [("GPUs", "rows", "ms a step", "longest of the first run", "GB")]
    for size, parts in found.items():
        rows += [
            (size, part["rows"], 1e3 * part["seconds"], 1e3 * part["first_seconds"], part["memory"] / 1e9)
            for part in parts
            if "rows" in part
        ]
    print_table("decode steps", rows)


def run(worker: str, size: int, folder: Path, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What rank 0 of `size` ranks tells. Raises RuntimeError with the last words of a rank that fails."""
    command = worker_command(worker, {**job, "workers": size})
    logs = [folder / f"{worker}_{size}_{rank}.log" for rank in range(size)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, own in enumerate(environments(size, folder)):
            with logs[rank].open("wb") as log:
                output = subprocess.PIPE if rank == 0 else log
                processes.append(subprocess.Popen(command, env=own, stdout=output, stderr=log))
        output, _ = processes[0].communicate(timeout=SECONDS)
        codes = [process.wait(10) for process in processes]
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{size} ranks took longer than {SECONDS:.0f} s:\n{last_words(logs)}") from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise RuntimeError(f"{size} ranks ended with {codes}:\n{last_words(logs)}")
    return [json.loads(line) for line in output.decode().splitlines() if line.startswith("{")]


def environments(size: int, folder: Path) -> list[dict[str, str]]:
    """The variables of each rank; one process has none of its own."""
    usual, seen = clean_environment(), devices() if has_gpu() else []
    if size == 1:
        return [usual | ({"CUDA_VISIBLE_DEVICES": seen[0]} if seen else {})]
    hosts, ports = [HOST] * size, free_ports(HOST, size + 1)
    own = variables("nccl" if seen else "ring", hosts, ports[:-1], ports[-1])
    hosts_file = folder / "hosts.json"
    hosts_file.write_text(ring_hosts(hosts, ports[:-1]))
    for rank, values in enumerate(own):
        values |= {"CUDA_VISIBLE_DEVICES": seen[rank]} if seen else {"MLX_HOSTFILE": os.fspath(hosts_file)}
    return [usual | values for values in own]


def last_words(logs: Sequence[Path]) -> str:
    return "\n".join(log.read_text(errors="replace")[-1500:] for log in logs if log.exists())
