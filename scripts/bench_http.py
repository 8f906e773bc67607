"""What HTTP costs: tokens/s of many streaming clients over loopback against those of the engine alone, in one process.

The clients are a process of their own that reads and counts bytes, so that they take little of the machine. Where more
than 16 streams are open, a server sends each what it has every `server.coalesce_ms`; that is measured as it comes, and
with each token sent at once. Rounds alternate, and each ratio is of one round.
"""

from argparse import ArgumentParser
from dataclasses import replace
from statistics import median

from job import add_model_options, base_job, blas_name, run_worker
from report import print_figures, print_table
from shapes import SHAPES


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add_model_options(parser)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape in place of the model")
    parser.add_argument("--clients", type=int, default=64, help="streams at the same time (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=160, help="of each stream (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    arguments = parser.parse_args()
    job = replace(
        base_job(arguments),
        shape=arguments.shape,
        prompts=arguments.clients,
        max_tokens=arguments.max_tokens,
        repeats=arguments.rounds,
    )
    found = run_worker("http_speed", job)
    alone, every, beats = (found[name] for name in ("engine", "every_token", "beats"))
    rows: list[tuple[str, ...]] = [("", "tokens/s", "of the engine alone")]
    for name, speeds in (("engine alone", alone), ("HTTP, every token at once", every), ("HTTP, as it comes", beats)):
        rows.append((name, f"{median(speeds):.0f}", f"{share(speeds, alone):.2f}"))
    print_table(f"{arguments.clients} streams: {arguments.shape or arguments.model}", rows)
    figures: dict[str, float | None] = {
        "engine.http.vs_bare": share(beats, alone),
        "engine.http.vs_bare_every_token": share(every, alone),
    }
    print_figures(figures, device=blas_name(job))


def share(speeds: list[float], alone: list[float]) -> float:
    return median(speed / other for speed, other in zip(speeds, alone, strict=True))


if __name__ == "__main__":
    main()
