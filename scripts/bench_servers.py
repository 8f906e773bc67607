"""Our server and mlx-lm's under the same clients: time to the first token, time between tokens, tokens/s.

Both have the model in float32 and the same BLAS. Ours sends each token at once (server.coalesce_ms=0), as theirs does.
Rounds alternate, each with a fresh process; what each client asks for is sampled at temperature 1, one request after
the other. Tokens are those of finished requests, as each server counts them.
"""

import asyncio
import json
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median, quantiles

from clients import Traffic, stream_for
from job import SCRIPTS, Job, add_model_options, base_job, blas_name, clean_environment, run_program, worker_environment
from problems import load_problems
from report import print_figures, print_table
from server_process import free_port, running_command, server_process

import parallm

OURS, THEIRS = "parallm.serve", "mlx_lm.server"
MODELS = {OURS: "base", THEIRS: "default_model"}
NUM_QUESTIONS = 64
WARM_UP_SECONDS = 3.0


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add_model_options(parser)
    parser.add_argument("--clients", type=int, default=16, help="streams at the same time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="of each round (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="of a completion (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    arguments = parser.parse_args()
    job = base_job(arguments)
    found: dict[str, list[Traffic]] = {OURS: [], THEIRS: []}
    with tempfile.TemporaryDirectory() as folder:
        model = in_float32(job.model, Path(folder))
        for _ in range(arguments.rounds):
            for who, rounds in found.items():
                with started(who, model, job, Path(folder)) as url:
                    rounds.append(asyncio.run(ask(who, url, job, arguments)))
    header = ("", "requests", "tokens/s", "first token p50 ms", "between tokens p50 ms", "p99 ms", "errors")
    print_table(f"{arguments.clients} streaming clients: {arguments.model}", [header, *map(row, found.items())])
    print_figures(
        {
            "serving.vs_mlx_lm_server": median(map(speed, found[OURS])) / median(map(speed, found[THEIRS])),
            "serving.ttft_vs_mlx_lm_server": middle("first", found[THEIRS]) / middle("first", found[OURS]),
            "serving.itl_vs_mlx_lm_server": middle("gaps", found[THEIRS]) / middle("gaps", found[OURS]),
            "serving.errors": sum(len(one.errors) for one in found[OURS]),
        },
        device=blas_name(job),
    )


def in_float32(model: str, folder: Path) -> str:
    """The model as a folder in the fast type of CPUs, which mlx-lm's server cannot be asked for."""
    source = str(Path(parallm.__file__).parent / "model" / "nano") if model == "nano" else model
    options = ["--hf-path", source, "--mlx-path", str(folder / "float32"), "--dtype", "float32"]
    run_program([sys.executable, "-m", "mlx_lm", "convert", *options], clean_environment())
    return str(folder / "float32")


@contextmanager
def started(who: str, model: str, job: Job, folder: Path) -> Iterator[str]:
    """The address of the server, while it runs."""
    if who == OURS:
        overrides = [f"model.path={model}", f"device.blas={job.blas}", "server.coalesce_ms=0", "name=bench"]
        with server_process(OURS, overrides, folder) as url:
            yield url
        return
    port = free_port()
    worker = [str(SCRIPTS / "with_blas.py"), str(SCRIPTS / "workers" / "mlx_lm_server.py")]
    command = [sys.executable, *worker, json.dumps({"model": model, "port": port, "blas": job.blas})]
    with running_command(command, port, folder / "mlx_lm_server.log", worker_environment(peer=True)) as server:
        yield server.url


async def ask(who: str, url: str, job: Job, arguments: Namespace) -> Traffic:
    questions = [problem.messages[-1].content for problem in load_problems(job.data, NUM_QUESTIONS)]
    streams = partial(stream_for, url, questions, clients=arguments.clients, max_tokens=arguments.max_tokens)
    await streams(seconds=min(WARM_UP_SECONDS, arguments.seconds), model=MODELS[who])
    return await streams(seconds=arguments.seconds, model=MODELS[who])


def speed(traffic: Traffic) -> float:
    return traffic.tokens / traffic.seconds


def middle(what: str, rounds: list[Traffic]) -> float:
    return median(value for one in rounds for value in getattr(one, what))


def row(named: tuple[str, list[Traffic]]) -> tuple[str, ...]:
    who, rounds = named
    late = quantiles([gap for one in rounds for gap in one.gaps], n=100, method="inclusive")[98]
    requests, errors = sum(one.finished for one in rounds), sum(len(one.errors) for one in rounds)
    times = (f"{1e3 * one:.1f}" for one in (middle("first", rounds), middle("gaps", rounds), late))
    return who, str(requests), f"{median(map(speed, rounds)):.0f}", *times, str(errors)


if __name__ == "__main__":
    main()
