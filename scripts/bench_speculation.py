"""What speculation brings: tokens/s of the engine without it, with n-gram lookup, and with a draft model, for few rows.

All ways sample the same tokens, which is checked. They take turns in one process, so that a busy machine slows all of
them. CPU seconds are those of the whole process: on a machine with other work they say more than the clock. Beside it
mlx-lm's speculative decoding with the same draft model, which is greedy and of one row, against mlx-lm without.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from job import Job, absolute, add_model_options, base_job, blas_name, run_worker
from report import print_figures, print_table

Round = dict[str, float]
HEAD = ("", "tokens/s", "over none", "over none, CPU time", "drafted a token", "accepted a token")


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add_model_options(parser)
    parser.add_argument("--draft", help="a small model with the same tokenizer (default: no draft model)")
    parser.add_argument("--prompts", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=128, help="of a completion (default: %(default)s)")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4], help="that decode together (default: 1 4)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    arguments = parser.parse_args()
    draft = None if arguments.draft is None else absolute(arguments.draft)
    sizes = {"prompts": arguments.prompts, "max_tokens": arguments.max_tokens, "repeats": arguments.rounds}
    job = replace(base_job(arguments), draft=draft, **sizes)
    figures: dict[str, float | None] = {}
    for rows in arguments.rows:
        found: dict[str, list[Round]] = run_worker("speculation_speed", replace(job, rows=rows))["found"]
        table = [row_of(name, rounds, found[plain(name)]) for name, rounds in found.items()]
        print_table(f"{rows} rows: {arguments.model}", [HEAD, *table])
        for name, rounds in found.items():
            if name != plain(name):
                figure = f"engine.speculation.{name.replace('/', '.')}.rows{rows}"
                figures[figure] = ratio(rounds, found[plain(name)])
                figures[f"{figure}.by_the_clock"] = ratio(rounds, found[plain(name)], "tokens_per_second")
    if draft is not None:
        figures["engine.speculation.mlx_lm.draft.rows1"] = beside(job)
    print_figures(figures, device=blas_name(job))


def beside(job: Job) -> float:
    """mlx-lm with the draft model over mlx-lm without."""
    found: dict[str, list[Round]] = run_worker("speculative_mlx_lm", job, peer=True)
    table = [row_of(name, rounds, found["none"]) for name, rounds in found.items()]
    print_table("mlx-lm, greedy, 1 row", [HEAD, *table])
    return ratio(found["draft"], found["none"])


def plain(name: str) -> str:
    """The same task and temperature without speculation."""
    return f"{name.rpartition('/')[0]}/none"


def row_of(name: str, rounds: Sequence[Round], others: Sequence[Round]) -> tuple[str, ...]:
    speed = median(one["tokens_per_second"] for one in rounds)
    counts = [f"{rounds[0][key]:.2f}" if key in rounds[0] else "" for key in ("drafted", "accepted")]
    clock, cpu = (ratio(rounds, others, key) for key in ("tokens_per_second", "tokens_per_cpu_second"))
    return name, f"{speed:.0f}", f"{clock:.2f}", f"{cpu:.2f}", *counts


def ratio(rounds: Sequence[Round], others: Sequence[Round], key: str = "tokens_per_cpu_second") -> float:
    """Median over rounds, each against its neighbour."""
    return median(one[key] / other[key] for one, other in zip(rounds, others, strict=True))


if __name__ == "__main__":
    main()
