"""LoRA on the experts of a mixture: decoding beside the base, and an update beside mlx-lm's.

Random weights of Qwen3-30B-A3B's shape, bfloat16, LoRA of rank 8 on all linear layers and experts, routers frozen.
mlx-lm trains the same layers with its own step and a loss of completion tokens alone, as many rows at a time as are
fastest. Weights are made on the GPU.
"""

from statistics import median

from bench.compare import print_table
from bench.measure.learner import attempt
from bench.measurement import Bar, Figures, Request, measurement

RANK = 8


@measurement(
    {
        "experts.gpu.lora_vs_base": Bar(min=0.85, needs="gpu"),
        "experts.gpu.update_vs_mlx_lm": Bar(min=1.5, needs="gpu"),
    },
    minutes=10,
    needs="gpu",
    is_quick_anywhere=True,
)
def experts_gpu(request: Request) -> Figures:
    size = request.size
    sizes = {"shape": "tiny-moe" if request.is_quick else "30b-a3b", "rank": RANK, "prompt": size(256, 16)}
    step = {"groups": size(2, 2), "group_size": size(8, 2), "completion": size(256, 8)}
    ours = attempt("expert_speed", rows=size(32, 4), new=size(128, 8), **sizes, **step)
    passes = [2, 4, 1] if not request.is_quick else [2]
    theirs = attempt(
        "mlx_lm_update", is_peer=True, passes=passes, settings={"head": "completions"}, repeats=2, **sizes, **step
    )
    if not ours:
        return {"experts.gpu.lora_vs_base": None, "experts.gpu.update_vs_mlx_lm": None}
    update, peer = median(ours["update_seconds"]), median(theirs["seconds"]) if theirs else None
    print_table(
        "LoRA on experts",
        [
            ("", "base", "with LoRA"),
            ("decoding, tokens/s", ours["base"], ours["lora"]),
            ("", "ParaLLM", "mlx-lm"),
            ("an update, s", update, peer),
            ("memory, GB", ours["peak_gb"], theirs.get("peak_gb")),
        ],
    )
    return {
        "experts.gpu.lora_vs_base": ours["lora"] / ours["base"],
        "experts.gpu.update_vs_mlx_lm": peer / update if peer else None,
    }
