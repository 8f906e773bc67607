"""Loads of every kind for our engine and BatchGenerator side by side: one table, and a figure for each load.

Random weights, greedy, a process for each load, side and round; sides take turns. Both compute every token by a forward
of its row, which is checked: speculation is off, as BatchGenerator has none and random weights repeat themselves more
than real text. BatchGenerator has the settings with which it is fastest (`workers/batch_generator_shape.py`). Tokens/s
are of sampled tokens, of prompt tokens for `prefill`.

b1, b64: rows that begin and end together.
prefill: 32 prompts that have nothing in common.
groups: 4 prompts of 8 rows each, from the first prompt token on. BatchGenerator knows no groups; it may be handed the
prompts' keys and values for each row, if that is faster.
mixed: prompts and outputs of all lengths, arriving as a Poisson process faster than either side can answer.
storm: requests of a few tokens that come at once, so that rows join and leave in nearly every step.
lora, lora8: rows of one version, or of eight in turns, against rows of the base; ours only.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from job import run_worker_parts
from report import print_table
from shapes import EngineJob
from tuning import described

OURS, THEIRS = "engine_shape", "batch_generator_shape"
COMPARED = ("b1", "b64", "prefill", "groups", "mixed", "storm")
ALONE = ("lora", "lora8")
LOADS = EngineJob(
    shape="25m",
    parts=(),
    prompt=64,
    new=32,
    repeats=1,
    group_prompt=256,
    requests=48,
    per_second=50.0,
    prompts=(16, 256),
    outputs=(8, 64),
    mixed_rows=32,
    peer_rows=(16, 32, 64),
)

Found = Mapping[tuple[str, str], list[dict[str, Any]]]


def measure_loads(job: EngineJob, rounds: int) -> dict[str, float | None]:
    """Run both sides in turns and print the table. Returns the figures; None where a part has failed.

    Raises ValueError if the two sides did not do the same work.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for part in COMPARED + ALONE:
        one = replace(job, parts=(part,))
        for _ in range(rounds):
            found[OURS, part] += results(OURS, one)
            if part in COMPARED:
                found[THEIRS, part] += (theirs := results(THEIRS, one))
                one = replace(one, peer_settings=theirs[0]["settings"] if theirs else None)
    header = ("load", "ours", "beside it", "ratio", "BatchGenerator's best settings")
    print_table(f"Loads: {job.shape} shape, random weights", [header, *(row(part, found) for part in COMPARED + ALONE)])
    return {figure_name(part): ratio(part, found) for part in COMPARED + ALONE}


def results(worker: str, job: EngineJob) -> list[dict[str, Any]]:
    """Of the job's parts that have not failed."""
    found = run_worker_parts(worker, job.dump(), peer=worker == THEIRS)
    return [result for result in found if "error" not in result]


def check_same_work(part: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raises ValueError unless each side computed each of the same number of tokens by a forward."""
    if ours["accepted"]:
        raise ValueError(f"{part}: {ours['accepted']} tokens of ours were guessed; measure with speculation none")
    if ours["tokens"] != theirs["tokens"]:
        raise ValueError(f"{part}: {ours['tokens']} tokens of ours, {theirs['tokens']} of BatchGenerator")


def figure_name(part: str) -> str:
    return f"engine.cpu.load.{part}.{'vs_base' if part in ALONE else 'vs_batchgenerator'}"


def row(part: str, found: Found) -> tuple[str, ...]:
    value = ratio(part, found)
    if value is None:
        return part, "-", "-", "-", "failed"
    if part in ALONE:
        ours, base = (1e3 * median(one) for one in steps(part, found))
        return part, f"{ours:.1f} ms a step", f"{base:.1f} ms of the base", f"{value:.2f}", ""
    ours, theirs = (f"{median(speeds(worker, part, found)):.0f} tokens/s" for worker in (OURS, THEIRS))
    settings = described(found[THEIRS, part][-1]["settings"])
    return part, ours, f"{theirs} BatchGenerator", f"{value:.2f}", settings


def ratio(part: str, found: Found) -> float | None:
    """Of ours to what stands beside it, larger is better; the median of the rounds."""
    if part in ALONE:
        own, base = steps(part, found)
        pairs = [one / other for one, other in zip(base, own, strict=True)]
    else:
        for ours, theirs in zip(found[OURS, part], found[THEIRS, part], strict=False):
            check_same_work(part, ours, theirs)
        rounds = zip(*(speeds(worker, part, found) for worker in (OURS, THEIRS)), strict=False)
        pairs = [our_speed / their_speed for our_speed, their_speed in rounds]
    return median(pairs) if pairs else None


def speeds(worker: str, part: str, found: Found) -> list[float]:
    return [one["tokens"] / median(one["seconds"]) for one in found[worker, part]]


def steps(part: str, found: Found) -> tuple[list[float], list[float]]:
    """Seconds of a step of each round, and of one of the base in turns with it."""
    rounds = found[OURS, part]
    return [median(one["step_seconds"]) for one in rounds], [median(one["plain"]["step_seconds"]) for one in rounds]
