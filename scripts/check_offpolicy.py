"""Sampling ahead of the learner: is no token older than the limit, and what does it give where lengths are ragged?

Runs the embedded model (or --model) on an environment whose completions differ widely in length: they end where the
model ends them at a high temperature, which gives about a log-normal distribution (see workers/off_policy.py); the
table says how long they were. Speed is that of whole steps (sampling, scoring, update, publishing) relative to a limit
of 0, on the same problems and seeds; steps count while as much is sampled as is trained on.

What can be gained has a bound: with a limit of 1 a step's sampling may begin no sooner than the update two steps
before has ended, so its longest completion still spans two steps instead of one.
"""

from argparse import ArgumentParser
from dataclasses import replace
from statistics import median
from typing import Any

from job import Job, add_model_options, base_job, blas_name, run_worker
from report import print_figures, print_table

MODES = {
    "limit 0": {"ahead": 0},
    "limit 1": {"ahead": 1},
    "limit 1, switching in flight": {"ahead": 1, "switches": True},
    "limit 2": {"ahead": 2},
}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add_model_options(parser)
    parser.add_argument("--steps", type=int, default=200, help="of the runs whose tokens are watched (%(default)s)")
    parser.add_argument("--speed-steps", type=int, default=12, help="of the runs that are timed (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of the speed comparison (%(default)s)")
    arguments = parser.parse_args()
    job = base_job(arguments)
    max_lag = watch(replace(job, prompts=2, group_size=4, max_tokens=64, steps=arguments.steps))
    timed = replace(job, prompts=8, max_tokens=256, steps=arguments.speed_steps)
    speedups = compare(timed, arguments.rounds)
    print_figures(
        {
            "offpolicy.max_lag": max_lag,
            "offpolicy.k1_speedup": speedups["limit 1"],
            "offpolicy.k1_switching_speedup": speedups["limit 1, switching in flight"],
            "offpolicy.k2_speedup": speedups["limit 2"],
        },
        device=blas_name(job),
    )


def watch(job: Job) -> float:
    """The age in versions of the oldest token that a learner with a limit of 1 was given, with and without switching.

    A limit of 2 runs along, to see that such tokens would be noticed.
    """
    rows = [("limit", "in flight", "steps", "oldest", "mean", "groups dropped")]
    oldest: dict[int, int] = {}
    for ahead, switches in ((1, False), (1, True), (2, False)):
        found = run_worker("off_policy", replace(job, ahead=ahead, switches=switches))
        oldest[ahead] = max(oldest.get(ahead, 0), found["max_lag"])
        numbers = (str(found["steps"]), str(found["max_lag"]), f"{found['mean_lag']:.2f}", str(found["dropped"]))
        rows.append((str(ahead), "switches" if switches else "stays", *numbers))
    print_table("Age of trained tokens in versions", rows)
    if oldest[2] < 2:
        raise RuntimeError(
            f"with a limit of 2 the oldest token was {oldest[2]} versions old: the watch sees too little"
        )
    return oldest[1]


def compare(job: Job, rounds: int) -> dict[str, float]:
    """Seconds of a step in each mode, and how much faster than with a limit of 0 it is: the median over the rounds.

    Modes take turns, so that a machine that is busy for a while slows all of a round.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in MODES}
    for _ in range(rounds):
        for name, values in MODES.items():
            found[name].append(run_worker("off_policy", replace(job, **values)))
    seconds = {name: [one["seconds_per_step"] for one in runs] for name, runs in found.items()}
    speedups = {
        name: median(plain / one for plain, one in zip(seconds["limit 0"], values, strict=True))
        for name, values in seconds.items()
    }
    rows = [("", "median s", "speedup", "of it update", "CPU s", "all s")]
    for name, values in seconds.items():
        update = median(one["update_seconds"] for one in found[name])
        cpu = median(one["cpu_seconds_per_step"] for one in found[name])
        every = " ".join(f"{one:.2f}" for one in values)
        rows.append((name, f"{median(values):.2f}", f"{speedups[name]:.2f}", f"{update:.2f}", f"{cpu:.2f}", every))
    half, tenth, hundredth, longest = found["limit 0"][0]["lengths"]
    lengths = f"{half:.0f} tokens at most, a tenth has {tenth:.0f} or more, a hundredth {hundredth:.0f}, the longest"
    print_table(f"Seconds of a step; half of the completions have {lengths} {longest}", rows)
    return speedups


if __name__ == "__main__":
    main()
