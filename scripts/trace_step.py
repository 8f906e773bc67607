"""What the layers of a decode step do on a GPU: its kernels in their order, when each begins and how long it takes.

Random weights of a shape, 8 layers of it. Each case is rows x versions of an adapter on all linear layers: 32x0 are 32
rows of the base. A layer lasts from one kernel of decode attention to the next; medians over those in which the device
did not wait. Needs MLX's CUDA build and torch, whose profiler is used.
"""

from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from job import run_worker_parts
from report import print_table
from shapes import SHAPES, EngineJob

LAYERS = 8
FIRST_OF_LAYER, NOT_FIRST = "decode_attention", "decode_attention_merge"
MOST_OVER_MEDIAN = 1.25
LONGEST_NAME = 70
Kernel = tuple[str, float, float]
"""Name, begin and duration in microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Medians over `num_layers` of the `of_layers` that were seen."""

    num_layers: int
    of_layers: int
    microseconds: float
    kernels: Sequence[Kernel]
    """Begin since that of the layer."""


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=["32x0", "32x1", "32x8"], help="(default: %(default)s)")
    parser.add_argument("--shape", default="8b", choices=sorted(SHAPES))
    arguments = parser.parse_args()
    job = EngineJob(shape=arguments.shape, layers=LAYERS, parts=tuple(arguments.cases), new=96)
    for found in run_worker_parts("step_trace", job.dump(), peer=False):
        if "error" in found:
            print(f"{found['part']}: {found['error']}")
        else:
            show(found["part"], layer_of(found["kernels"]))


def layer_of(kernels: Sequence[Kernel]) -> Layer:
    """The usual layer of these kernels, which are in their order."""
    firsts = [place for place, (name, *_) in enumerate(kernels) if FIRST_OF_LAYER in name and NOT_FIRST not in name]
    spans = list(pairwise(firsts))
    lasted = [kernels[after][1] - kernels[first][1] for first, after in spans]
    most = MOST_OVER_MEDIAN * median(lasted)
    layers = [span for span, one in zip(spans, lasted, strict=True) if one <= most]
    found: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for first, after in layers:
        seen: Counter[str] = Counter()
        for name, begin, takes in kernels[first:after]:
            found[name, seen[name]].append((begin - kernels[first][1], takes))
            seen[name] += 1
    usual = [
        (name, median(begin for begin, _ in times), median(takes for _, takes in times))
        for (name, _), times in found.items()
        if len(times) > len(layers) / 2
    ]
    return Layer(
        num_layers=len(layers),
        of_layers=len(spans),
        microseconds=median(one for one in lasted if one <= most),
        kernels=sorted(usual, key=lambda kernel: kernel[1]),
    )


def show(case: str, layer: Layer) -> None:
    rows = [
        (name.removeprefix("void ")[:LONGEST_NAME], f"{begin:.1f}", f"{takes:.1f}")
        for name, begin, takes in layer.kernels
    ]
    title = f"{case}: {layer.microseconds:.1f} us a layer ({layer.num_layers} of {layer.of_layers} layers)"
    print_table(title, [("kernel", "begins", "takes"), *rows])


if __name__ == "__main__":
    main()
