"""Speed of the engine: whole rollouts and loads of every kind beside mlx-lm's BatchGenerator, speculation,
quantization.

Random weights where a shape is named, greedy there; a process for each side, which take turns. Both sides compute every
token by a forward of its row, which is checked: speculation is off where random weights decode, since they repeat
themselves more than real text. BatchGenerator has the settings with which it is fastest; the table says which.

floor: the time to read all weights once, at 90% of the 4.8 TB/s that an H200 is sold with. b1, b64: rows that begin and
end together. prefill: 32 prompts that have nothing in common. groups: 4 prompts of 8 rows each; BatchGenerator may be
handed the prompts' keys and values for each row. mixed: prompts and outputs of all lengths, arriving as a Poisson
process. storm: requests of a few tokens that come at once. lora, lora8: decode steps of rows of one version, or of
eight in turns, against rows of the base. sampling16: rows that differ in temperature, top-k, top-p and min-p;
penalties16: in penalties and biases, too. join: what one row that joins or leaves costs, over a step. memory: bytes
that 128 rows of 32 to 4,096 tokens hold, over those of their tokens.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.compare import described, in_turns, print_table, ratio, tune
from bench.measurement import Bar, Figures, Request, measurement
from bench.processes import NANO, run_program, work, work_in_parts
from bench.workers.loads import Load

OURS, THEIRS = "engine_parts", "batch_generator_parts"
BYTES_PER_SECOND = 4.3e12
GROUP_SIZE = 8
Found = Mapping[str, Mapping[str, Any]]
"""By side and part: `engine_parts.8b.b1`."""


@measurement(
    {
        "engine.cpu.tokens_per_second": Bar(),
        "engine.cpu.batchgenerator_tokens_per_second": Bar(),
        "engine.cpu.vs_batchgenerator": Bar(min=2.5, needs="model"),
        "engine.cpu.lora.vs_batchgenerator": Bar(),
        "engine.cpu.vs_stock_mlx_lm": Bar(min=12, needs="model"),
    },
    minutes=23,
)
def rollouts(request: Request) -> Figures:
    """Whole rollouts of a model. Stock mlx-lm, with the BLAS that its wheel links, gets fewer prompts and one round."""
    size = request.size
    job = {"model": request.model, "data": request.data, "max_tokens": size(160, 32), "group_size": GROUP_SIZE}
    fewer = size(32, 2)

    def ours(number: int, **more: Any) -> float:
        return float(work("engine_speed", **job, prompts=size(64, 8), rows=256, seed=number, **more)["speed"])

    def theirs(prompts: int, number: int, **more: Any) -> float:
        done = work("batch_generator_speed", is_peer=True, **job, prompts=prompts, seed=number, **more)
        return float(done["speed"])

    choices = {"rows": (32, 64, 128, 256), "prompts_at_once": (1, 8, 32)}
    start = {"rows": 32, "prompts_at_once": 8}
    best = tune(start, choices, lambda settings: 1 / theirs(fewer, 0, **settings))[0].settings
    peer = partial(theirs, size(64, 8), **best)
    speeds = in_turns(size(3, 1), {"engine": ours, "BatchGenerator": peer})
    speeds |= in_turns(1, {"engine, LoRA": partial(ours, lora=True), "BatchGenerator, LoRA": partial(peer, lora=True)})
    speeds["BatchGenerator, reference BLAS"] = [theirs(size(8, 2), 0, rows=64, prompts_at_once=8, blas="reference")]
    rows = [(name, median(values), " ".join(f"{one:.0f}" for one in values)) for name, values in speeds.items()]
    print_table(f"Rollouts, tokens/s; BatchGenerator with {described(best)}", [("", "median", "all"), *rows])
    engine, generator = speeds["engine"], speeds["BatchGenerator"]
    return {
        "engine.cpu.tokens_per_second": median(engine),
        "engine.cpu.batchgenerator_tokens_per_second": median(generator),
        "engine.cpu.vs_batchgenerator": ratio(engine, generator),
        "engine.cpu.lora.vs_batchgenerator": ratio(speeds["engine, LoRA"], speeds["BatchGenerator, LoRA"]),
        "engine.cpu.vs_stock_mlx_lm": median(engine) / speeds["BatchGenerator, reference BLAS"][0],
    }


def vs_batch_generator(part: str, found: Found) -> tuple[float, str, str]:
    ours, theirs = found[f"{OURS}.{part}"], found[f"{THEIRS}.{part}"]
    check_same_work(part, ours, theirs)
    speeds = [one["tokens"] / median(one["seconds"]) for one in (ours, theirs)]
    beside = f"{speeds[1]:.0f} BatchGenerator, {described(theirs['settings'])}"
    return speeds[0] / speeds[1], f"{speeds[0]:.0f} tokens/s", beside


def check_same_work(part: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ValueError unless each side computed each of the same number of tokens by a forward."""
    if ours["accepted"]:
        raise ValueError(f"{part}: {ours['accepted']} tokens of ours were guessed; measure with speculation none")
    if ours["tokens"] != theirs["tokens"]:
        raise ValueError(f"{part}: {ours['tokens']} tokens of ours, {theirs['tokens']} of BatchGenerator")


def vs_base(part: str, found: Found) -> tuple[float, str, str]:
    one = found[f"{OURS}.{part}"]
    step, base = median(one["step_seconds"]), median(one["plain"]["step_seconds"])
    return base / step, step_text(one), f"base {step_text(one['plain'])}"


def vs_greedy(part: str, found: Found) -> tuple[float, str, str]:
    value, ours, plain = vs_base(part, found)
    return 1 / value, ours, plain.replace("base", "greedy")


def vs_floor(part: str, found: Found) -> tuple[float, str, str]:
    one = found[f"{OURS}.{part}"]
    floor = one["weight_bytes"] / BYTES_PER_SECOND
    return median(one["step_seconds"]) / floor, step_text(one), f"{floor * 1e3:.2f} ms floor"


def computed_tokens(part: str, found: Found) -> tuple[float, str, str]:
    one = found[f"{OURS}.{part}"]
    return one["computed"] / one["of_rows"], f"{one['computed']} tokens", f"{one['of_rows']} of all rows"


def held_vs_needed(part: str, found: Found) -> tuple[float, str, str]:
    one = found[f"{OURS}.{part}"]
    return one["held"] / one["needed"], f"{one['held'] / 1e9:.3f} GB held", f"{one['needed'] / 1e9:.3f} GB of tokens"


def change_vs_step(part: str, found: Found) -> tuple[float, str, str]:
    one = found[f"{OURS}.{part}"]
    plain, churn, changes = (median(one[name]) for name in ("plain_seconds", "churn_seconds", "changes"))
    cost = (churn - plain) / changes
    return cost / plain, f"{cost * 1e3:.3f} ms", f"{plain * 1e3:.2f} ms a step"


def step_text(one: Mapping[str, Any]) -> str:
    step, host = (median(one[name]) * 1e3 for name in ("step_seconds", "host_seconds"))
    return f"{step:.2f} ms a step, {host:.2f} of the host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the workers, and what its figure makes of their results."""

    name: str
    value: Callable[[str, Found], tuple[float, str, str]]
    """The figure, ours, and what stands beside it."""
    bar: Bar

    @property
    def sides(self) -> tuple[str, ...]:
        return (OURS, THEIRS) if self.value is vs_batch_generator else (OURS,)


CPU_PARTS = {
    f"engine.cpu.load.{name}.vs_batchgenerator": Part(name=f"25m.{name}", value=vs_batch_generator, bar=Bar())
    for name in ("b1", "b64", "prefill", "groups", "mixed", "storm")
} | {
    f"engine.cpu.load.{name}.vs_base": Part(name=f"25m.{name}", value=vs_base, bar=Bar()) for name in ("lora", "lora8")
}
GPU_PARTS = {
    "engine.gpu.05b.b1.vs_batchgenerator": Part(
        name="0.5b.b1", value=vs_batch_generator, bar=Bar(min=1.3, needs="gpu")
    ),
    "engine.gpu.05b.b128.vs_batchgenerator": Part(
        name="0.5b.b128", value=vs_batch_generator, bar=Bar(min=1.8, needs="gpu")
    ),
    "engine.group.prompt_tokens_ratio": Part(name="0.5b.group", value=computed_tokens, bar=Bar(max=1 / 7, needs="gpu")),
    "engine.gpu.pages.memory_ratio": Part(name="0.5b.memory", value=held_vs_needed, bar=Bar(max=1.1, needs="gpu")),
    "engine.gpu.8b.b1.vs_floor": Part(name="8b.b1", value=vs_floor, bar=Bar(max=1.4, needs="gpu")),
    "engine.gpu.8b.b32.vs_floor": Part(name="8b.b32", value=vs_floor, bar=Bar(max=1.75, needs="gpu")),
    "engine.gpu.8b.b128.vs_batchgenerator": Part(
        name="8b.b128", value=vs_batch_generator, bar=Bar(min=2.1, needs="gpu")
    ),
    "engine.gpu.8b_4bit.b32.vs_batchgenerator": Part(
        name="8b-4bit.b32", value=vs_batch_generator, bar=Bar(min=1.5, needs="gpu")
    ),
    "engine.gpu.8b.lora.vs_base": Part(name="8b.lora", value=vs_base, bar=Bar(min=0.82, needs="gpu")),
    "engine.gpu.8b.lora8.vs_base": Part(name="8b.lora8", value=vs_base, bar=Bar(min=0.7, needs="gpu")),
    "engine.sampling16.vs_greedy": Part(name="8b.sampling16", value=vs_greedy, bar=Bar(max=1.15, needs="gpu")),
    "engine.penalties16.vs_greedy": Part(name="8b.penalties16", value=vs_greedy, bar=Bar()),
    "engine.join.vs_step": Part(name="8b.join", value=change_vs_step, bar=Bar(max=0.05, needs="gpu")),
    "engine.gpu.mixed.vs_batchgenerator": Part(name="8b.mixed", value=vs_batch_generator, bar=Bar(min=2, needs="gpu")),
}
CPU_LOAD = Load(
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
QUICK = {"new": 8, "prompt": 16, "repeats": 1, "cached": 64, "churn": 8, "group_prompt": 64, "requests": 8}
QUICK_LENGTHS = {"prompts": (4, 64), "outputs": (2, 16)}
SMALL_SHAPES = {"0.5b": "tiny", "8b": "tiny", "8b-4bit": "tiny-4bit"}
"""Those of the parts on a GPU, and what stands for them."""
GPU_LIMIT = 560.0
"""Seconds of one process."""


@measurement({name: part.bar for name, part in CPU_PARTS.items()}, minutes=9)
def loads(request: Request) -> Figures:
    """Random weights of 25M parameters. A process for each load, side and round."""
    figures: Figures = {}
    rows = []
    load = replace(CPU_LOAD, **(QUICK | QUICK_LENGTHS)) if request.is_quick else CPU_LOAD
    for figure, part in CPU_PARTS.items():
        if request.wants(figure):
            rounds = compare_part(part, load, request.size(3, 1), "tiny" if request.is_quick else "25m")
            values = [value for value, *_ in rounds]
            figures[figure] = median(values) if values else None
            rows.append((figure, *(rounds[-1] if rounds else ("-", "failed", ""))))
    print_table("Loads on random weights, the last round", [("figure", "ratio", "ours", "beside"), *rows])
    return figures


def compare_part(part: Part, load: Load, rounds: int, shape: str) -> list[tuple[float, str, str]]:
    """What each round says of one part. The peer looks for its settings in the first round and keeps them.

    Raises ValueError if the two sides did not do the same work.
    """
    values = []
    for _ in range(rounds):
        found = {}
        for side in part.sides:
            name = part.name.rpartition(".")[2]
            for result in work_in_parts(side, is_peer=side == THEIRS, shape=shape, parts=[name], load=asdict(load)):
                if "error" not in result:
                    found[f"{side}.{part.name}"] = result
                    load = replace(load, peer_settings=result.get("settings", load.peer_settings))
        if len(found) == len(part.sides):
            values.append(part.value(part.name, found))
    return values


@measurement({name: part.bar for name, part in GPU_PARTS.items()}, minutes=20, needs="gpu")
def gpu_parts(request: Request) -> Iterator[Figures]:
    """A process for each shape and side, so that each has the memory for itself; one that fails costs its parts."""
    return measure_gpu_parts(request, SMALL_SHAPES if request.is_quick else {})


def measure_gpu_parts(request: Request, shapes: Mapping[str, str]) -> Iterator[Figures]:
    """`shapes` stand for those of the parts' names. Figures come as soon as their parts are there."""
    wanted = {figure: part for figure, part in GPU_PARTS.items() if request.wants(figure)}
    load = replace(Load(), **(QUICK | QUICK_LENGTHS)) if request.is_quick else Load()
    found: dict[str, Mapping[str, Any]] = {}
    for shape in SMALL_SHAPES:
        for side in (OURS, THEIRS):
            sided = [part.name.rpartition(".") for part in wanted.values() if side in part.sides]
            names = [name for of, _, name in sided if of == shape]
            options = {"shape": shapes.get(shape, shape), "parts": names, "load": asdict(load)}
            for result in work_in_parts(side, is_peer=side == THEIRS, limit=GPU_LIMIT, **options) if names else ():
                print(f"  {side} {shape} {result}", flush=True)
                if "error" not in result:
                    name = f"{shape}.{result['part']}"
                    found[f"{side}.{name}"] = result
                    yield gpu_figures({figure: part for figure, part in wanted.items() if part.name == name}, found)


def gpu_figures(parts: Mapping[str, Part], found: Found) -> Figures:
    """Those whose parts are there. Raises ValueError if two sides did not do the same work."""
    figures: Figures = {}
    for figure, part in parts.items():
        with suppress(KeyError):
            figures[figure], *sides = part.value(part.name, found)
            print(f"  {figure} {figures[figure]:.4g}: {'; '.join(sides)}", flush=True)
    return figures


@measurement(
    {
        "engine.gpu.captured.b1": Bar(min=1.3),
        "engine.gpu.captured.b16": Bar(min=1.3),
        "engine.gpu.captured.b128": Bar(min=1),
        "engine.gpu.8b_captured.b1": Bar(min=1),
        "engine.gpu.8b_captured.b32": Bar(min=1),
    },
    minutes=2,
    needs="gpu",
    is_quick_anywhere=True,
)
def captured(request: Request) -> Iterator[Figures]:
    """Tokens/s of rounds of 256 tokens of an adapter, 0.5B and 8B, whose steps are replayed as CUDA graphs, over those
    whose kernels MLX hands over one by one; rows of several sample the same tokens both ways."""
    small, large = (("", "0.5b", rows) for rows in (1, 16, 128)), (("8b_", "8b", rows) for rows in (1, 32))
    for name, shape, rows in (*small, *large):
        figure = f"engine.gpu.{name}captured.b{rows}"
        if not request.wants(figure):
            continue
        job: dict[str, Any] = {"shape": shape, "rows": rows, "new": 256, "rounds": 5}
        if request.is_quick:
            job = {"shape": "tiny", "rows": min(rows, 8), "new": 4, "rounds": 1}
        found = [
            one for one in work_in_parts("captured_steps", is_peer=False, limit=GPU_LIMIT, **job) if "launched" in one
        ]
        ways = [[one[way] for one in found] for way in ("launched", "replayed")]
        yield {figure: ratio(*ways) if found else None}


MORE_ROWS = {256: 128, 512: 256, 1024: 512}
"""Numbers of rows, and those that they are compared with."""


@measurement(
    {
        **{f"engine.gpu.more_rows.b{rows}": Bar(min=1) for rows in MORE_ROWS},
        "engine.gpu.control_more_rows.b256": Bar(max=1),
    },
    minutes=1.5,
    needs="gpu",
    is_quick_anywhere=True,
)
def more_rows(request: Request) -> Iterator[Figures]:
    """Tokens/s of rows that decode 256 tokens at once, over those of half as many, 0.5B. Control: steps of more than
    128 rows are not captured."""
    for name, most_captured, rows_of_figures in (("more_rows", 1024, MORE_ROWS), ("control_more_rows", 128, (256,))):
        figures = {f"engine.gpu.{name}.b{rows}": rows for rows in rows_of_figures}
        wanted = {figure: rows for figure, rows in figures.items() if request.wants(figure)}
        if not wanted:
            continue
        counts = sorted({count for rows in wanted.values() for count in (rows, MORE_ROWS[rows])})
        job: dict[str, Any] = {"shape": "0.5b", "rows": counts, "new": 256, "rounds": 5}
        if request.is_quick:
            job = {"shape": "tiny", "rows": [8, 16, 32, 64], "new": 4, "rounds": 1}
        options = {"most_captured": most_captured, **job}
        found = list(work_in_parts("row_speed", is_peer=False, limit=GPU_LIMIT, **options))
        speeds = {rows: [one["speed"] for one in found if one["rows"] == rows] for rows in job["rows"]}
        if len({len(one) for one in speeds.values()}) > 1 or not found:  # the worker has not come to its end
            yield dict.fromkeys(wanted)
            continue
        print_table("Tokens/s by rows", [("rows", "tokens/s"), *((rows, median(one)) for rows, one in speeds.items())])
        for figure, rows in wanted.items():
            pair = (16, 8) if request.is_quick else (rows, MORE_ROWS[rows])
            yield {figure: ratio(*(speeds[one] for one in pair))}


@measurement(
    {
        "engine.speculation.problems.greedy.ngram.rows1": Bar(),
        "engine.speculation.problems.greedy.ngram.rows4": Bar(),
        "engine.speculation.problems.sampled.ngram.rows1": Bar(min=1, needs="model"),
        "engine.speculation.problems.sampled.ngram.rows4": Bar(min=1, needs="model"),
    },
    minutes=6,
)
def speculation(request: Request) -> Figures:
    """N-gram lookup over none: tokens a CPU second of the process, which other work on the machine does not slow."""
    size, table = request.size, []
    figures: Figures = {}
    for rows in (1, 4):
        job = {"model": request.model, "data": request.data, "rows": rows, "prompts": size(8, 2)}
        found = work("speculation_speed", **job, max_tokens=size(128, 32), rounds=size(3, 1))
        for task in ("greedy", "sampled"):
            pairs = [[one["tokens_per_cpu_second"] for one in found[f"{task}/{way}"]] for way in ("ngram", "none")]
            figures[f"engine.speculation.problems.{task}.ngram.rows{rows}"] = ratio(*pairs)
            accepted = found[f"{task}/ngram"][0]["accepted"]
            table.append((f"{rows} rows, {task}", median(pairs[0]), median(pairs[1]), ratio(*pairs), accepted))
    header = ("", "tokens a CPU second", "without", "ratio", "accepted a token")
    print_table("N-gram speculation", [header, *table])
    return figures


@measurement(
    {f"quantized.{bits}bit_packed.{what}_vs_full": Bar() for what in ("base_bytes", "decode") for bits in (8, 4)},
    minutes=4,
)
def quantized(request: Request) -> Figures:
    """Bases as `mlx_lm.convert -q` makes them, in groups of 64, their weights kept packed, beside full precision."""
    job = {"data": request.data, "prompts": request.size(8, 2), "max_tokens": request.size(64, 16)}
    source = str(NANO) if request.model == "nano" else request.model
    with tempfile.TemporaryDirectory() as folder:
        sides = {"full": partial(decode, request.model, "auto", job)}
        for bits in (8, 4):
            path = str(Path(folder) / f"{bits}_bits")
            options = ["--hf-path", source, "--mlx-path", path, "-q", "--q-bits", str(bits), "--q-group-size", "64"]
            run_program([sys.executable, "-m", "mlx_lm", "convert", *options])
            sides[f"{bits}bit_packed"] = partial(decode, path, "packed", job)
        found = in_turns(request.size(3, 1), sides)
    figures: Figures = {}
    table = []
    for name, rounds in found.items():
        speed, size = median(one["speed"] for one in rounds), rounds[0]["base_bytes"]
        table.append((name, speed, size / 1e6))
        if name != "full":
            figures[f"quantized.{name}.base_bytes_vs_full"] = size / found["full"][0]["base_bytes"]
            figures[f"quantized.{name}.decode_vs_full"] = speed / median(one["speed"] for one in found["full"])
    print_table("Quantized bases", [("", "tokens/s", "base MB"), *table])
    return figures


def decode(model: str, how: str, job: Mapping[str, Any], _: int) -> Mapping[str, Any]:
    return work("engine_speed", model=model, quantized=how, rows=128, ignore_eos=True, **job)
