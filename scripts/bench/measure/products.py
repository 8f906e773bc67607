"""Products of few rows with weights of 4 bits: whether their plans are the fastest ones."""

from typing import Any

from bench.compare import print_table
from bench.measurement import Bar, Figures, Request, measurement
from bench.processes import work_in_parts

LAYERS = {
    "8B": {"qkv": (4096, 6144), "o": (4096, 4096), "gate and up": (4096, 28672), "down": (14336, 4096)},
    "a fourth of 70B": {"qkv": (8192, 2560), "o": (2048, 8192), "gate and up": (8192, 14336), "down": (7168, 8192)},
}
"""Inputs and outputs of the linear layers."""
ROWS = (1, 32)
SHOWN = 4
COLUMNS = ("splits", "chunk", "tall", "wide", "deep", "stages")


@measurement(
    {f"products.4bit.best_over_chosen_b{rows}": Bar(min=0.9, needs="gpu") for rows in ROWS}, minutes=5, needs="gpu"
)
def quantized_plans(request: Request) -> Figures:
    """Microseconds of the fastest of 64 plans over those of the plan in use, all products of a layer together, of the
    model where that is less. Only plans with as many parts of the input, whose sums others add. Needs torch beside
    MLX."""
    products = [
        {
            "name": f"{model} {name}",
            "rows": rows,
            "inputs": inputs,
            "outputs": outputs,
            "is_gated": name == "gate and up",
            "is_whole": name in ("qkv", "gate and up"),
        }
        for rows in ROWS
        for model, layers in LAYERS.items()
        for name, (inputs, outputs) in layers.items()
    ]
    found = list(
        work_in_parts(
            "product_plans",
            is_peer=False,
            python=request.torch_python,
            products=products,
            num_plans=request.size(64, 8),
        )
    )
    if len(found) < len(products):
        raise RuntimeError(f"the worker has measured {len(found)} of {len(products)} products")
    for one in found:
        show(one)
    return {f"products.4bit.best_over_chosen_b{rows}": best_over_chosen(found, rows) for rows in ROWS}


def best_over_chosen(found: list[dict[str, Any]], rows: int) -> float:
    """Time of the fastest plans over that of the plans in use. `found`: what `product_plans` yields."""
    ratios = []
    for model in LAYERS:
        times = [one["microseconds"] for one in found if one["rows"] == rows and one["name"].startswith(model)]
        ratios.append(sum(map(min, times)) / sum(one[0] for one in times))
    return min(ratios)


def show(one: dict[str, Any]) -> None:
    times, plans = one["microseconds"], one["plans"]
    fastest = sorted(range(len(times)), key=times.__getitem__)[:SHOWN]
    rows = [(times[place], *(plans[place][name] for name in COLUMNS), place) for place in (0, *fastest)]
    print_table(f"{one['name']}, {one['rows']} rows: the plan in use, the fastest", [("us", *COLUMNS, "rank"), *rows])
