"""Measurements, the figures that they give, and the bar of each figure.

The modules of `bench/measure` register their functions with `measurement`; the command (`__main__.py`) chooses among
them by the names of figures. Every figure belongs to one measurement.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from bench.processes import blas_name
from parallm.distributed.launcher import devices

DEFAULT_PEERS = Path("~/.cache/parallm/peers").expanduser()
Figures = dict[str, float | None]
Measured = Figures | Iterator[Figures]
"""All figures at the end, or some as soon as they are known; the latest value of each counts."""
Result = TypeVar("Result", bound=Measured)
NOT_JUDGED, SHORT, MISSING, MET = "not judged here", "FALLS SHORT", "NOT MEASURED", "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The bounds of a figure. A figure without bounds is only shown."""

    min: float | None = None
    max: float | None = None
    max_figure: str | None = None
    """Name of the figure that holds `max`, where it depends on the model."""
    needs: str = ""
    """The bar holds with these alone: model (and data), gpu, gpus2 (or 4: as many GPUs), strict (MKL's strict mode),
    clones."""

    def text(self) -> str:
        low = [f">= {self.min:g}"] if self.min is not None else []
        return " and ".join(low + ([f"<= {self.max:g}"] if self.max is not None else []))

    def with_bounds(self, figures: Figures) -> "Bar":
        return self if self.max_figure is None else replace(self, max=figures.get(self.max_figure))

    def is_met(self, value: float) -> bool:
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)

    def verdict(self, value: float | None, here: frozenset[str]) -> str:
        """`here` is what this run has of `needs`."""
        if self == Bar():
            return ""
        if not here.issuperset(self.needs.split()) and not (self.needs == "clones" and value is not None):
            return NOT_JUDGED
        if value is None or not self.text():
            return MISSING
        return MET if self.is_met(value) else SHORT


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of the command, which every measurement is given."""

    wanted: Sequence[str] = ("",)
    """Beginnings of names of figures."""
    model: str = "nano"
    """nano, or a local folder."""
    data: str | None = None
    """Folder with train.jsonl and test.jsonl in GSM8K's form; None: the arithmetic problems."""
    environments: Sequence[Path] = ()
    """Clones of Atropos, verifiers and prime-rl."""
    peers: Path = DEFAULT_PEERS
    torch_python: str = sys.executable
    vllm: Path | None = None
    """A folder of packages with vLLM, for `torch_python`; None: it is installed there."""
    is_quick: bool = False

    @property
    def has_model(self) -> bool:
        return self.model != "nano" and self.data is not None

    def wants(self, figure: str) -> bool:
        return any(figure.startswith(beginning) for beginning in self.wanted)

    def size(self, whole: int, quick: int) -> int:
        return quick if self.is_quick else whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    name: str
    bars: Mapping[str, Bar]
    """By the name of the figure."""
    measure: Callable[[Request], Measured]
    minutes: float
    needs: str
    """It does not run without this: model or gpu; empty: it runs everywhere."""
    is_quick_anywhere: bool = False
    """Whether it needs nothing of this with small sizes."""


MEASUREMENTS: list[Measurement] = []


def measurement(
    bars: Mapping[str, Bar], *, minutes: float, needs: str = "", is_quick_anywhere: bool = False
) -> Callable[[Callable[[Request], Result]], Callable[[Request], Result]]:
    def register(function: Callable[[Request], Result]) -> Callable[[Request], Result]:
        MEASUREMENTS.append(
            Measurement(
                name=function.__name__,
                bars=bars,
                measure=function,
                minutes=minutes,
                needs=needs,
                is_quick_anywhere=is_quick_anywhere,
            )
        )
        return function

    return register


def bars() -> dict[str, Bar]:
    """All figures in the order of their measurements."""
    return {name: bar for one in MEASUREMENTS for name, bar in one.bars.items()}


def chosen(request: Request, here: frozenset[str]) -> list[Measurement]:
    """The measurements of the wanted figures that can run with what is here."""
    return [
        one
        for one in MEASUREMENTS
        if here.issuperset(one.needs.split()) or (request.is_quick and one.is_quick_anywhere)
        if any(map(request.wants, one.bars))
    ]


def found_here(request: Request) -> frozenset[str]:
    """The needs that this machine and these options meet."""
    here = set()
    if blas_name().endswith("strict"):
        here.add("strict")
    if request.has_model:
        here.add("model")
    if has_gpu():
        here |= {"gpu", *(f"gpus{count}" for count in range(2, num_gpus() + 1))}
    return frozenset(here)


def request_of_tests() -> Request:
    """What the command, or a person, has told tests by variables."""
    return Request(
        model=os.environ.get("PARALLM_MODEL", "nano"),
        data=os.environ.get("PARALLM_GSM8K"),
        environments=[Path(name) for name in os.environ.get("PARALLM_CLONES", "").split(os.pathsep) if name],
        peers=Path(os.environ.get("PARALLM_PEERS", DEFAULT_PEERS)),
        is_quick="PARALLM_QUICK" in os.environ,
    )


@cache
def has_gpu() -> bool:
    """Whether MLX computes on an NVIDIA GPU. Another process answers: this one never loads MLX."""
    question = "import mlx.core as mx; print(mx.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False)
    return done.stdout.strip() == "True"


def num_gpus() -> int:
    return len(devices()) if has_gpu() else 0


UNITS = (
    (r"vs_|speedup|_ratio(_|$)|sharing_gain$", 1, "x"),
    (r"accuracy|fraction|coverage|_share|share_|drift", 100, "%"),
    (r"_ms(_|$)", 1, " ms"),
    (r"_mb$", 1, " MB"),
    (r"_gb$", 1, " GB"),
    (r"seconds", 1, " s"),
)


def shown(name: str, value: float) -> str:
    """The value with its unit, which the figure's name tells."""
    factor, unit = next(((factor, unit) for pattern, factor, unit in UNITS if re.search(pattern, name)), (1, ""))
    text = f"{value:,.0f}" if not unit and value == int(value) else f"{factor * value:.3g}"
    return f"{text}{unit}"
