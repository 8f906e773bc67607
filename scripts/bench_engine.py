"""Tokens per second of the engine and of mlx-lm's BatchGenerator, on the same weights with the same BLAS.

First whole rollouts on a real model, then loads of every kind on random weights (`engine_loads.py`).
Rounds alternate between the two, each in a fresh process, so that a busy machine slows both; a ratio is the median over
the rounds. BatchGenerator runs with the batch size, our own among them, and the number of prompts at once with which it
was fastest on fewer prompts. Stock mlx-lm, with the reference BLAS that its wheel links, is measured once and on fewer
prompts, because it is an order of magnitude slower: its figure is per token.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from statistics import median

from engine_loads import LOADS, measure_loads
from job import Job, add_model_options, base_job, blas_name, run_worker
from report import print_figures, print_table
from shapes import SHAPES
from tuning import Settings, described, tune

OURS, THEIRS = "engine_speed", "batch_generator_speed"
PROMPTS_AT_ONCE = (1, 8, 32)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add_model_options(parser)
    parser.add_argument("--prompts", type=int, default=64, help="problems, 8 completions each (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=160, help="of a completion (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=256, help="completions that decode together (default: %(default)s)")
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[32, 64, 128], help="batch sizes BatchGenerator may use"
    )
    parser.add_argument("--tuned-prompts", type=int, default=32, help="on which its settings are tried (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (default: %(default)s)")
    parser.add_argument("--lora-rounds", type=int, default=1, help="the same with LoRA; 0: leave it out")
    parser.add_argument("--stock-prompts", type=int, default=8, help="for the reference BLAS; 0: leave it out")
    parser.add_argument("--load-rounds", type=int, default=3, help="of the loads of every kind; 0: leave them out")
    parser.add_argument("--load-shape", choices=sorted(SHAPES), default=LOADS.shape, help="default: %(default)s")
    parser.add_argument("--only-loads", action="store_true", help="leave the rollouts out")
    arguments = parser.parse_args()
    job = replace(base_job(arguments), prompts=arguments.prompts, max_tokens=arguments.max_tokens, rows=arguments.rows)
    figures: dict[str, float | None] = {} if arguments.only_loads else measure_rollouts(job, arguments)
    if arguments.load_rounds:
        figures |= measure_loads(replace(LOADS, shape=arguments.load_shape), arguments.load_rounds)
    print_figures(figures, device=blas_name(job))


def measure_rollouts(job: Job, arguments: Namespace) -> dict[str, float | None]:
    peer = best_settings(job, sorted({*arguments.sizes, arguments.rows}), arguments.tuned_prompts)
    shown = f"{peer.rows} rows, {peer.prompts_at_once} prompts"
    ours, theirs = alternate(job, peer, arguments.rounds)
    rows = [speed_row("engine", ours), speed_row(f"BatchGenerator, {shown}", theirs, ours)]
    figures: dict[str, float | None] = {
        "engine.cpu.tokens_per_second": median(ours),
        "engine.cpu.batchgenerator_tokens_per_second": median(theirs),
        "engine.cpu.vs_batchgenerator": ratio(ours, theirs),
        "engine.cpu.vs_stock_mlx_lm": None,
    }
    if arguments.lora_rounds:
        lora = replace(job, lora=True)
        lora_ours, lora_theirs = alternate(lora, replace(peer, lora=True), arguments.lora_rounds)
        rows += [speed_row("engine, LoRA", lora_ours)]
        rows += [speed_row(f"BatchGenerator, LoRA, {shown}", lora_theirs, lora_ours)]
        figures["engine.cpu.lora.vs_batchgenerator"] = ratio(lora_ours, lora_theirs)
    if arguments.stock_prompts:
        stock = [stock_speed(job, arguments.stock_prompts)]
        rows.append(speed_row(f"BatchGenerator, reference BLAS, {arguments.stock_prompts} prompts", stock, ours))
        figures["engine.cpu.vs_stock_mlx_lm"] = median(ours) / median(stock)
    title = f"Tokens/s: {arguments.model}, {job.prompts} prompts x {job.group_size}, {job.max_tokens} tokens"
    print_table(title, [("", "median", "all", "engine / this"), *rows])
    return figures


def best_settings(job: Job, sizes: list[int], prompts: int) -> Job:
    """The same job with the settings at which BatchGenerator is fastest, tried on fewer prompts."""
    fewer = replace(job, prompts=min(prompts, job.prompts))

    def seconds_of(settings: Settings) -> float:
        return 1 / tokens_per_second(THEIRS, replace(fewer, **settings))

    start = {"rows": sizes[0], "prompts_at_once": job.prompts_at_once}
    trials = tune(start, {"rows": sizes, "prompts_at_once": PROMPTS_AT_ONCE}, seconds_of)
    rows = [(described(trial.settings), f"{1 / trial.seconds:.0f}") for trial in trials if trial.seconds]
    print_table(f"BatchGenerator by its settings, {fewer.prompts} prompts", [("settings", "tokens/s"), *rows])
    return replace(job, **trials[0].settings)


def alternate(job: Job, peer: Job, rounds: int) -> tuple[list[float], list[float]]:
    """Our speeds and theirs."""
    ours: list[float] = []
    theirs: list[float] = []
    for place in range(rounds):
        ours.append(tokens_per_second(OURS, replace(job, seed=place)))
        theirs.append(tokens_per_second(THEIRS, replace(peer, seed=place)))
    return ours, theirs


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the rounds."""
    return median(one / other for one, other in zip(ours, theirs, strict=True))


def stock_speed(job: Job, prompts: int) -> float:
    fewer = replace(job, prompts=prompts, blas="reference", rows=64)
    return tokens_per_second(THEIRS, fewer)


def tokens_per_second(worker: str, job: Job) -> float:
    return float(run_worker(worker, job, peer=worker == THEIRS)["tokens_per_second"])


def speed_row(name: str, speeds: list[float], ours: list[float] | None = None) -> tuple[str, ...]:
    shown = f"{median(ours) / median(speeds):.2f}" if ours else ""
    return name, f"{median(speeds):.0f}", " ".join(f"{speed:.0f}" for speed in speeds), shown


if __name__ == "__main__":
    main()
