"""Updates of hybrid models (Qwen3.5's shapes, random weights): our learner beside mlx-lm's loop and PyTorch with fla.

The same rows for all, with prompts that no rows share; medians. mlx-lm's recurrence is a loop over tokens in Python;
its step is not compiled as a whole, which takes minutes. On a GPU it is measured with its gradient checkpointing, since
what the loop keeps of 8 rows fills an H200. On a CPU it is measured with the BLAS of MLX's wheel, as pip leaves it, and
with ours.
"""

from collections.abc import Mapping
from statistics import median
from typing import Any

from bench.compare import print_table
from bench.measure.learner import attempt, our_blas
from bench.measurement import Bar, Figures, Request, measurement

LOOP = {"head": "completions", "compiled": False}
SAME_BLAS = "mlx-lm, our BLAS"
WHEEL_BLAS = {"BENCH_BLAS_LIBRARY": ""}


@measurement({"hybrid.cpu.update_vs_loop": Bar(min=20), "hybrid.cpu.update_vs_loop_same_blas": Bar()}, minutes=5)
def hybrid_cpu(request: Request) -> Figures:
    """8 rows of 256 prompt and 64 completion tokens, 25 million parameters."""
    job = {"shape": "hybrid-25m", "groups": request.size(8, 2), "group_size": 1, "prompt": request.size(256, 32)}
    job |= {"completion": request.size(64, 16), "repeats": request.size(2, 1)}
    found = {"parallm": attempt("parallm_update", **job), "mlx-lm": mlx_lm(job), SAME_BLAS: mlx_lm(job, our_blas())}
    print_updates(found)
    return {
        "hybrid.cpu.update_vs_loop": ratio(found, "mlx-lm"),
        "hybrid.cpu.update_vs_loop_same_blas": ratio(found, SAME_BLAS),
    }


@measurement(
    {"hybrid.gpu.update_vs_mlx_lm": Bar(min=20, needs="gpu"), "hybrid.gpu.update_vs_fla": Bar(min=1, needs="gpu")},
    minutes=8,
    needs="gpu",
)
def hybrid_gpu(request: Request) -> Figures:
    """8 rows of 256 prompt and 256 completion tokens; PyTorch only where flash-linear-attention is installed,
    which on Hopper asks for Triton 3.7.1 or tilelang: the gradients of older Triton are wrong there."""
    half = request.size(256, 64)
    shape = "hybrid-tiny" if request.is_quick else "qwen3.5-0.8b"
    job = {"shape": shape, "groups": 8, "group_size": 1, "prompt": half, "completion": half, "repeats": 2}
    found = {"parallm": attempt("parallm_update", **job)}
    if request.wants("hybrid.gpu.update_vs_fla"):
        python = {"python": request.torch_python, "environment": {"BENCH_BLAS_LIBRARY": ""}}
        done = attempt("torch_update", is_peer=True, **python, **job, passes=(8,), settings=None)
        found["PyTorch + PEFT + fla"] = done if done.get("has_fla") else {}
    if request.wants("hybrid.gpu.update_vs_mlx_lm"):
        # without checkpoints two rows at once need more than 141 GB; fewer would repeat the loop over tokens
        settings = LOOP | {"checkpoint": True, "rows": 8}
        found["mlx-lm"] = attempt("mlx_lm_update", is_peer=True, **job | {"repeats": 1}, passes=(8,), settings=settings)
    print_updates(found)
    return {
        "hybrid.gpu.update_vs_mlx_lm": ratio(found, "mlx-lm"),
        "hybrid.gpu.update_vs_fla": ratio(found, "PyTorch + PEFT + fla"),
    }


def mlx_lm(job: dict[str, Any], blas: Mapping[str, str] = WHEEL_BLAS) -> dict[str, Any]:
    settings = {"settings": LOOP | {"rows": job["groups"]}, "passes": (), "repeats": 1}
    return attempt("mlx_lm_update", is_peer=True, environment=blas, **job | settings)


def print_updates(found: dict[str, dict[str, Any]]) -> None:
    print_table(
        "One update", [("", "median s", "peak GB"), *((who, *shown(done)) for who, done in found.items() if done)]
    )


def ratio(found: dict[str, dict[str, Any]], peer: str) -> float | None:
    """Seconds of a peer over ours; None where one is missing."""
    ours, other = found["parallm"], found.get(peer)
    return median(other["seconds"]) / median(ours["seconds"]) if ours and other else None


def shown(done: dict[str, Any]) -> tuple[float, float]:
    return median(done["seconds"]), done["peak_gb"] or 0.0
