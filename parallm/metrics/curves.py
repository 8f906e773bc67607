"""curves.png: the panels that a kind of run has numbers for, two beside each other.

`RunRecorder.finish` draws it from the rows that are on disk.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

MetricsRow = Mapping[str, Any]
Points = tuple[tuple[int, float], ...]
Scale = Literal["share", "from zero", "free"]
MAX_PARTS = 8
"""Lines of one panel that can still be distinguished."""
BLUE, ORANGE, GREEN, GREY = "#1f5fa8", "#d9730d", "#2a8a4a", "#8a8a8a"
COLOURS = (BLUE, ORANGE, GREEN, "#a83255", "#6d4bb0", "#2b8f94", "#8a6d1f", GREY)
MARKER_STEPS = 60
"""Up to this many steps each one gets a dot; beyond, dots would hide the line."""
NUM_SMOOTHED = 10
NUM_COLUMNS = 2
TOP, ROW, GAP, BELOW = 0.75, 3.1, 0.8, 0.5
"""Inches: above the first panel, a row of panels, between two, below the last."""
SIDES = {"left": 0.065, "right": 0.945, "wspace": 0.2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Numbers by step; a gap is NaN."""

    label: str
    points: Points
    is_noisy: bool = False
    """Single steps scatter, so that a long run shows their running mean, too."""
    intervals: tuple[tuple[float, float], ...] = ()
    """Intervals of held-out measures, one for each point: drawn as marks with bars."""
    is_marked: bool = False
    """Drawn as marks without bars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    series: tuple[Series, ...]
    scale: Scale = "from zero"
    right: Series | None = None
    """A share with an axis of its own."""


def draw_curves(steps: Sequence[MetricsRow], evaluations: Sequence[MetricsRow], *, file: Path, title: str) -> None:
    """Write `file`. Rows may miss numbers. Raises OSError if it cannot be written."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - takes a second, and only the end of a run needs it

    panels = panels_of(steps, evaluations)
    num_rows = max(1, -(-len(panels) // NUM_COLUMNS))
    height = TOP + ROW * num_rows
    figure = Figure(figsize=(12, height), dpi=110)
    # matplotlib's own layouts draw everything once more
    figure.subplots_adjust(**SIDES, top=1 - TOP / height, bottom=BELOW / height, hspace=GAP / (ROW - GAP))
    figure.suptitle(f"{title}: {len(steps)} {'step' if len(steps) == 1 else 'steps'}", fontsize=14, y=1 - 0.2 / height)
    grid = figure.subplots(num_rows, NUM_COLUMNS, squeeze=False, sharex=True).flat
    for axes, panel in zip(grid, panels, strict=False):
        draw_panel(axes, panel)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    if not panels:
        figure.text(0.5, 0.5, "no step has ended", color=GREY, ha="center", va="center")
    temporary = file.with_name(file.name + ".tmp")
    figure.savefig(temporary, format="png")
    temporary.replace(file)


def draw_panel(axes: Any, panel: Panel) -> None:
    for series, colour in zip(panel.series, COLOURS, strict=False):
        draw_series(axes, series, colour)
    set_scale(axes, panel)
    if panel.right is not None:
        draw_on_the_right(axes, panel.right)
    axes.set_title(panel.title, fontsize=11, loc="left")
    if panel.right is None and any(series.label for series in panel.series):
        axes.legend(loc="best", fontsize=9, framealpha=0.85)
    axes.grid(visible=True, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(labelbottom=True)
    axes.set_xlabel("step", fontsize=9)


def draw_series(axes: Any, line: Series, colour: str) -> None:
    x, y = [step for step, _ in line.points], [value for _, value in line.points]
    style = {"color": colour, "label": line.label}
    if line.intervals:
        below = [value - low for value, (low, _) in zip(y, line.intervals, strict=True)]
        above = [high - value for value, (_, high) in zip(y, line.intervals, strict=True)]
        axes.errorbar(x, y, yerr=[below, above], marker="s", markersize=5, capsize=4, **style)
    elif line.is_marked:
        axes.plot(x, y, marker="s", markersize=5, **style)
    elif line.is_noisy and len(x) > MARKER_STEPS:
        axes.plot(x, y, alpha=0.35, **style)
        axes.plot(x, running_mean(y, NUM_SMOOTHED), color=colour, label=f"its mean over {NUM_SMOOTHED} steps")
    else:
        axes.plot(x, y, marker="o" if len(x) <= MARKER_STEPS else "", markersize=3, **style)


def set_scale(axes: Any, panel: Panel) -> None:
    if panel.scale == "share":
        axes.set_ylim(-0.02, 1.02)
    elif panel.scale == "from zero":
        low, high = min(0.0, axes.dataLim.y0), max(0.0, axes.dataLim.y1)
        axes.set_ylim(1.08 * low, 1.08 * high if high > low else 1.0)


def draw_on_the_right(axes: Any, series: Series) -> None:
    """A share with an axis of its own; the legend of both lines stands above them."""
    right = axes.twinx()
    draw_series(right, series, ORANGE)
    right.set_ylim(-0.02, 1.02)
    right.spines["top"].set_visible(False)
    right.tick_params(axis="y", colors=ORANGE)
    axes.set_ylim(0, 1.3 * axes.dataLim.y1)
    axes.legend(handles=[*axes.get_lines(), *right.get_lines()], loc="upper right", fontsize=9, framealpha=0.85)


def panels_of(steps: Sequence[MetricsRow], evaluations: Sequence[MetricsRow]) -> list[Panel]:
    """The panels in the order of reading, none of them empty."""
    is_sampled = any("reward/mean" in row for row in steps)
    lengths, cut = series(steps, "completion/length_mean", "mean length"), []
    if lengths.points:
        cut = _unless_zero(series(steps, "completion/truncated_fraction", "truncated fraction (right)"))
    return [
        *([] if is_sampled else _of_loss(steps, evaluations)),
        *(_of_rewards(steps, evaluations) if is_sampled or not steps else []),
        *_panel("reward by environment", _named(steps, "environment/", ending="/reward"), least=2, scale=None),
        *_panel("reward parts", _named(steps, "reward_part/"), least=2, scale=None),
        *_panel("share of groups with signal", [_share_with_signal(steps)], scale="share"),
        *_panel("KL to the base (nats per token)", [series(steps, "update/kl_to_base")]),
        *_panel("KL to the sampling policy (nats per token)", _unless_zero(series(steps, "update/kl_to_behaviour"))),
        *_panel("entropy (nats per token)", [series(steps, "update/entropy")]),
        *_panel("gradient norm before clipping", [series(steps, "update/gradient_norm")]),
        *_panel("learning rate", _if_it_varies(series(steps, "update/learning_rate"))),
        *_panel("completion length (tokens)", [lengths], right=next(iter(cut), None)),
        *_panel("tokens per second", _speeds(steps)),
    ]


def series(rows: Sequence[MetricsRow], name: str, label: str = "", *, is_noisy: bool = False) -> Series:
    """The numbers under `name`; without points if there are none."""
    points = tuple((row["step"], _number(row.get(name))) for row in rows)
    has_numbers = any(not math.isnan(value) for _, value in points)
    return Series(label=label, points=points if has_numbers else (), is_noisy=is_noisy)


def held_out(evaluations: Sequence[MetricsRow], name: str, low: str, high: str, label: str) -> Series:
    """Measures with their 95% intervals; without points if there are none."""
    rows = [row for row in evaluations if not math.isnan(_number(row.get(name)))]
    return Series(
        label=label,
        points=tuple((row["step"], _number(row[name])) for row in rows),
        intervals=tuple((_number(row.get(low)), _number(row.get(high))) for row in rows),
    )


def running_mean(values: Sequence[float], count: int) -> list[float]:
    """Return the mean of each value and up to `count - 1` before it, gaps left out."""
    windows = [values[max(0, end - count) : end] for end in range(1, len(values) + 1)]
    numbers = [[value for value in window if not math.isnan(value)] for window in windows]
    return [sum(window) / len(window) if window else math.nan for window in numbers]


def _panel(
    title: str,
    lines: Iterable[Series],
    *,
    least: int = 1,
    scale: Scale | None = "from zero",
    right: Series | None = None,
) -> Iterator[Panel]:
    """A panel of the lines that have points, if there are at least `least` of them; without a scale, as they need."""
    drawn = tuple(line for line in lines if line.points)
    if len(drawn) >= least:
        yield Panel(title=title, series=drawn, scale=scale or _scale_of(drawn), right=right)


def _scale_of(lines: Sequence[Series]) -> Scale:
    values = [value for line in lines for _, value in line.points if not math.isnan(value)]
    return "share" if all(0 <= value <= 1 for value in values) else "free"


def _of_loss(steps: Sequence[MetricsRow], evaluations: Sequence[MetricsRow]) -> Iterator[Panel]:
    """Panels of supervised runs; the loss of a policy's objective says nothing about how good it is."""
    is_of_pairs = any("update/margin" in row for row in steps)
    rows = [row for row in evaluations if row.get("heldout/loss") is not None]
    marks = replace(series(rows, "heldout/loss", "held out"), is_marked=True)
    loss = series(steps, "update/loss", "training", is_noisy=True)
    yield from _panel(f"loss (nats per {'pair' if is_of_pairs else 'token'})", [loss, marks], scale="free")
    if is_of_pairs:
        margins = held_out(evaluations, "heldout/margin", "heldout/margin_low", "heldout/margin_high", "held out (95%)")
        training = series(steps, "update/accuracy", "training", is_noisy=True)
        yield from _panel("accuracy on pairs", [training, _accuracy(evaluations, "held out (95%)")], scale="share")
        yield from _panel("margin", [series(steps, "update/margin", "training", is_noisy=True), margins], scale="free")
    elif steps:
        yield from _panel("held-out accuracy", [_accuracy(evaluations, "greedy (95%)")], scale="share")


def _of_rewards(steps: Sequence[MetricsRow], evaluations: Sequence[MetricsRow]) -> Iterator[Panel]:
    reward = series(steps, "reward/mean", "reward, training", is_noisy=True)
    accuracy = _accuracy(evaluations, "accuracy, held out (95%)")
    yield from _panel("reward and held-out accuracy", [reward, accuracy], scale=None)


def _accuracy(evaluations: Sequence[MetricsRow], label: str) -> Series:
    return held_out(evaluations, "heldout/accuracy", "heldout/low", "heldout/high", label)


def _named(steps: Sequence[MetricsRow], beginning: str, *, ending: str = "") -> list[Series]:
    """A line for each name between `beginning` and `ending`, in alphabetical order."""
    names = sorted({name for row in steps for name in row if name.startswith(beginning) and name.endswith(ending)})
    shown = [name[len(beginning) : len(name) - len(ending)] for name in names]
    return [series(steps, name, label) for name, label in zip(names, shown, strict=True)][:MAX_PARTS]


def _share_with_signal(steps: Sequence[MetricsRow]) -> Series:
    rows = [row for row in steps if row.get("groups/sampled")]
    points = tuple((row["step"], _number(row.get("groups/with_signal")) / row["groups/sampled"]) for row in rows)
    return Series(label="", points=points)


def _speeds(steps: Sequence[MetricsRow]) -> list[Series]:
    names = ("rollout/tokens_per_second", "serving/tokens_per_second")
    return [one for name in names for one in _unless_zero(series(steps, name, name.partition("/")[0]))]


def _unless_zero(line: Series) -> list[Series]:
    return [line] if any(value != 0 for _, value in line.points if not math.isnan(value)) else []


def _if_it_varies(line: Series) -> list[Series]:
    """After a warm-up most runs have one rate."""
    later = {value for _, value in line.points[len(line.points) // 2 :] if not math.isnan(value)}
    return [line] if len(later) > 1 and len(line.points) > 2 else []


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
