"""curves.png: how a run went, two panels beside each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallm.metrics.panels import Panel, Row, Series, panels_of, running_mean

BLUE, ORANGE, GREEN, GREY = "#1f5fa8", "#d9730d", "#2a8a4a", "#8a8a8a"
COLOURS = (BLUE, ORANGE, GREEN, "#a83255", "#6d4bb0", "#2b8f94", "#8a6d1f", GREY)
MARKER_STEPS = 60
"""Up to this many steps each one gets a dot; beyond, dots would hide the line."""
NUM_SMOOTHED = 10
NUM_COLUMNS = 2


def draw_curves(steps: Sequence[Row], evaluations: Sequence[Row], *, file: Path, title: str) -> None:
    """Write `file`. Rows may miss numbers. Raises OSError if it cannot be written."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - takes a second, and only the end of a run needs it

    panels = panels_of(steps, evaluations)
    num_rows = max(1, -(-len(panels) // NUM_COLUMNS))
    figure = Figure(figsize=(12, 0.6 + 3.1 * num_rows), dpi=110, layout="constrained")
    figure.suptitle(f"{title}: {len(steps)} {'step' if len(steps) == 1 else 'steps'}", fontsize=14)
    places = figure.subplots(num_rows, NUM_COLUMNS, squeeze=False, sharex=True).flat
    for place, panel in zip(places, panels, strict=False):
        draw_panel(place, panel)
    for place in places[len(panels) :]:
        place.set_axis_off()
    if not panels:
        figure.text(0.5, 0.5, "no step has ended", color=GREY, ha="center", va="center")
    temporary = file.with_name(file.name + ".tmp")
    figure.savefig(temporary, format="png")
    temporary.replace(file)


def draw_panel(place: Any, panel: Panel) -> None:
    """Draw on the axes `place`."""
    for series, colour in zip(panel.series, COLOURS, strict=False):
        draw_series(place, series, colour)
    set_scale(place, panel)
    if panel.right is not None:
        draw_on_the_right(place, panel.right)
    place.set_title(panel.title, fontsize=11, loc="left")
    if panel.right is None and any(series.label for series in panel.series):
        place.legend(loc="best", fontsize=9, framealpha=0.85)
    place.grid(visible=True, color="#e4e4e4", linewidth=0.8)
    place.set_axisbelow(True)
    place.spines[["top", "right"]].set_visible(False)
    place.xaxis.get_major_locator().set_params(integer=True)
    place.tick_params(labelbottom=True)
    place.set_xlabel("step", fontsize=9)


def draw_series(place: Any, series: Series, colour: str) -> None:
    x, y = [step for step, _ in series.points], [value for _, value in series.points]
    if series.intervals:
        below = [value - low for value, (low, _) in zip(y, series.intervals, strict=True)]
        above = [high - value for value, (_, high) in zip(y, series.intervals, strict=True)]
        place.errorbar(x, y, yerr=[below, above], color=colour, marker="s", markersize=5, capsize=4, label=series.label)
    elif series.is_marked:
        place.plot(x, y, color=colour, marker="s", markersize=5, label=series.label)
    elif series.is_noisy and len(x) > MARKER_STEPS:
        place.plot(x, y, color=colour, alpha=0.35, label=series.label)
        mean = running_mean(y, NUM_SMOOTHED)
        place.plot(x, mean, color=colour, label=f"its mean over {NUM_SMOOTHED} steps")
    else:
        place.plot(x, y, color=colour, marker=marker(x), markersize=3, label=series.label)


def set_scale(place: Any, panel: Panel) -> None:
    if panel.scale == "share":
        place.set_ylim(-0.02, 1.02)
    elif panel.scale == "from zero":
        low, high = min(0.0, place.dataLim.y0), max(0.0, place.dataLim.y1)
        place.set_ylim(1.08 * low, 1.08 * high if high > low else 1.0)


def draw_on_the_right(place: Any, series: Series) -> None:
    """A share with an axis of its own; the legend of both lines stands above them."""
    right = place.twinx()
    x = [step for step, _ in series.points]
    right.plot(
        x, [value for _, value in series.points], color=ORANGE, marker=marker(x), markersize=3, label=series.label
    )
    right.set_ylim(-0.02, 1.02)
    right.spines["top"].set_visible(False)
    right.tick_params(axis="y", colors=ORANGE)
    place.set_ylim(0, 1.3 * place.dataLim.y1)
    place.legend(handles=[*place.get_lines(), *right.get_lines()], loc="upper right", fontsize=9, framealpha=0.85)


def marker(x: Sequence[int]) -> str:
    return "o" if len(x) <= MARKER_STEPS else ""
