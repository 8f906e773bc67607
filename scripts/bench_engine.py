"""Tokens per second of the engine and of mlx-lm's BatchGenerator, on the same weights with the same BLAS.

First whole rollouts on a real model, then loads of every kind on random weights (`engine_loads.py`).
Rounds alternate between the two, each in a fresh process, so that a busy machine slows both. BatchGenerator runs at the
best of several batch sizes, our own among them. Stock mlx-lm, with the reference BLAS that its wheel links, is measured
once and on fewer prompts, because it is an order of magnitude slower: its figure is per token.
"""

from argparse import ArgumentParser
from dataclasses import replace
from statistics import median

from engine_loads import LOADS, measure_loads
from job import Job, add_model_options, base_job, blas_name, run_worker
from report import print_figures, print_table

OURS, THEIRS = "engine_speed", "batch_generator_speed"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add_model_options(parser)
    parser.add_argument("--prompts", type=int, default=64, help="problems, 8 completions each (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=160, help="of a completion (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=256, help="completions that decode together (default: %(default)s)")
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[32, 64, 128], help="batch sizes BatchGenerator may use"
    )
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (default: %(default)s)")
    parser.add_argument("--lora-rounds", type=int, default=1, help="the same with LoRA; 0: leave it out")
    parser.add_argument("--stock-prompts", type=int, default=8, help="for the reference BLAS; 0: leave it out")
    parser.add_argument("--load-rounds", type=int, default=1, help="of the loads of every kind; 0: leave them out")
    arguments = parser.parse_args()
    job = replace(base_job(arguments), prompts=arguments.prompts, max_tokens=arguments.max_tokens, rows=arguments.rows)
    size, first = best_size(job, sorted({*arguments.sizes, arguments.rows}))
    ours, theirs = alternate(job, size, arguments.rounds, first)
    rows = [speed_row("engine", ours), speed_row(f"BatchGenerator, {size} rows", theirs, ours)]
    figures: dict[str, float | None] = {
        "engine.cpu.tokens_per_second": median(ours),
        "engine.cpu.vs_batchgenerator": median(ours) / median(theirs),
        "engine.cpu.vs_stock_mlx_lm": None,
    }
    if arguments.lora_rounds:
        lora_ours, lora_theirs = alternate(replace(job, lora=True), size, arguments.lora_rounds, [])
        rows += [speed_row("engine, LoRA", lora_ours)]
        rows += [speed_row(f"BatchGenerator, LoRA, {size} rows", lora_theirs, lora_ours)]
        figures["engine.cpu.lora.vs_batchgenerator"] = median(lora_ours) / median(lora_theirs)
    if arguments.stock_prompts:
        stock = [stock_speed(job, arguments.stock_prompts)]
        rows.append(speed_row(f"BatchGenerator, reference BLAS, {arguments.stock_prompts} prompts", stock, ours))
        figures["engine.cpu.vs_stock_mlx_lm"] = median(ours) / median(stock)
    title = f"Tokens/s: {arguments.model}, {job.prompts} prompts x {job.group_size}, {job.max_tokens} tokens"
    print_table(title, [("", "median", "all", "engine / this"), *rows])
    if arguments.load_rounds:
        figures |= measure_loads(LOADS, arguments.load_rounds)
    print_figures(figures, device=blas_name(job))


def best_size(job: Job, sizes: list[int]) -> tuple[int, list[float]]:
    """The batch size at which BatchGenerator is fastest, and its speed there."""
    found = {size: tokens_per_second(THEIRS, replace(job, rows=size)) for size in sizes}
    print_table(
        "BatchGenerator by batch size", [("rows", "tokens/s"), *((str(s), f"{v:.0f}") for s, v in found.items())]
    )
    best = max(found, key=lambda size: found[size])
    return best, [found[best]]


def alternate(job: Job, size: int, rounds: int, first: list[float]) -> tuple[list[float], list[float]]:
    """Our speeds and theirs; `first` are speeds of theirs that are known already."""
    ours: list[float] = []
    theirs = list(first)
    for place in range(rounds):
        ours.append(tokens_per_second(OURS, replace(job, seed=place)))
        theirs.append(tokens_per_second(THEIRS, replace(job, rows=size, seed=place)))
    return ours, theirs


def stock_speed(job: Job, prompts: int) -> float:
    fewer = replace(job, prompts=prompts, blas="reference", rows=64)
    return tokens_per_second(THEIRS, fewer)


def tokens_per_second(worker: str, job: Job) -> float:
    return float(run_worker(worker, job, peer=worker == THEIRS)["tokens_per_second"])


def speed_row(name: str, speeds: list[float], ours: list[float] | None = None) -> tuple[str, ...]:
    ratio = f"{median(ours) / median(speeds):.2f}" if ours else ""
    return name, f"{median(speeds):.0f}", " ".join(f"{speed:.0f}" for speed in speeds), ratio


if __name__ == "__main__":
    main()
