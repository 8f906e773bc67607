"""curves.png: how a run went, in six panels, from the rows that are on disk."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
BLUE, ORANGE, GREEN, GREY = "#1f5fa8", "#d9730d", "#2a8a4a", "#8a8a8a"
MARKER_STEPS = 60
"""Up to this many steps each one gets a dot; beyond, dots would hide the line."""
NUM_SMOOTHED = 10


def draw_curves(steps: Sequence[Row], evaluations: Sequence[Row], *, file: Path, title: str) -> None:
    """Write `file`. Rows may miss numbers; panels without numbers say so. Raises OSError if it cannot be written."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - takes a second, and only the end of a run needs it

    figure = Figure(figsize=(12, 10), dpi=110, layout="constrained")
    figure.suptitle(f"{title}: {len(steps)} steps", fontsize=14)
    panels = figure.subplots(3, 2, sharex=True)
    draw_reward(panels[0][0], steps, evaluations)
    draw_lines(panels[0][1], steps, {"update/kl_to_behaviour": BLUE}, title="KL to the sampling policy")
    draw_lines(panels[1][0], steps, {"update/entropy": BLUE}, title="entropy (nats per token)")
    draw_lines(panels[1][1], steps, {"update/gradient_norm": BLUE}, title="gradient norm before clipping")
    speeds = {"rollout/tokens_per_second": BLUE, "serving/tokens_per_second": ORANGE}
    draw_lines(panels[2][0], steps, speeds, title="tokens per second")
    draw_lengths(panels[2][1], steps)
    for panel in panels.flat:
        panel.grid(visible=True, color="#e4e4e4", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.xaxis.get_major_locator().set_params(integer=True)
    for panel in panels[-1]:
        panel.set_xlabel("step")
    temporary = file.with_name(file.name + ".tmp")
    figure.savefig(temporary, format="png")
    temporary.replace(file)


def draw_reward(panel: Any, steps: Sequence[Row], evaluations: Sequence[Row]) -> None:
    """Reward of each step, its running mean in long runs, and held-out accuracy with its 95% interval."""
    x, y = points(steps, "reward/mean")
    is_long = len(x) > MARKER_STEPS
    panel.plot(
        x, y, color=BLUE, alpha=0.35 if is_long else 1.0, marker=marker(x), markersize=3, label="reward, training"
    )
    if is_long:
        panel.plot(x, running_mean(y, NUM_SMOOTHED), color=BLUE, label=f"its mean over {NUM_SMOOTHED} steps")
    known = [row for row in evaluations if row.get("heldout/accuracy") is not None]
    if known:
        accuracy = [row["heldout/accuracy"] for row in known]
        below = [row["heldout/accuracy"] - row["heldout/low"] for row in known]
        above = [row["heldout/high"] - row["heldout/accuracy"] for row in known]
        panel.errorbar(
            [row["step"] for row in known],
            accuracy,
            yerr=[below, above],
            color=ORANGE,
            marker="s",
            markersize=5,
            capsize=4,
            label="accuracy, held out (95%)",
        )
    values = y + [row["heldout/high"] for row in known]
    if values and min(y, default=0.0) >= 0 and max(values) <= 1:
        panel.set_ylim(-0.02, 1.02)
    finish_panel(panel, "reward and held-out accuracy", has_numbers=bool(values))


def draw_lines(panel: Any, steps: Sequence[Row], names: Mapping[str, str], *, title: str) -> None:
    """One line for each name, in its colour; a legend if there is more than one."""
    has_numbers = False
    for name, colour in names.items():
        x, y = points(steps, name)
        has_numbers = has_numbers or bool(y)
        panel.plot(x, y, color=colour, marker=marker(x), markersize=3, label=name.partition("/")[0])
    finish_panel(panel, title, has_numbers=has_numbers, has_legend=len(names) > 1)
    if has_numbers:
        panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]) if panel.dataLim.y0 < 0 else 0.0)


def draw_lengths(panel: Any, steps: Sequence[Row]) -> None:
    """Mean length on the left axis, truncated fraction on the right."""
    x, y = points(steps, "completion/length_mean")
    panel.plot(x, y, color=BLUE, marker=marker(x), markersize=3, label="mean length")
    right = panel.twinx()
    x_cut, y_cut = points(steps, "completion/truncated_fraction")
    right.plot(x_cut, y_cut, color=ORANGE, marker=marker(x_cut), markersize=3, label="truncated fraction (right)")
    right.set_ylim(-0.02, 1.02)
    right.spines["top"].set_visible(False)
    right.tick_params(axis="y", colors=ORANGE)
    finish_panel(panel, "completion length (tokens)", has_numbers=bool(y), has_legend=False)
    if y:
        panel.set_ylim(0, 1.25 * max(y))
        panel.legend(handles=[*panel.get_lines(), *right.get_lines()], loc="upper right", fontsize=9, framealpha=0.85)


def finish_panel(panel: Any, title: str, *, has_numbers: bool, has_legend: bool = True) -> None:
    panel.set_title(title, fontsize=11, loc="left")
    if not has_numbers:
        panel.set_yticks([])
        panel.text(0.5, 0.5, "no numbers", color=GREY, ha="center", va="center", transform=panel.transAxes)
    elif has_legend:
        panel.legend(loc="best", fontsize=9, framealpha=0.85)


def points(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values; a missing value is a gap in the line, and nothing at all is two empty lists."""
    values = [row.get(name) for row in rows]
    if all(value is None for value in values):
        return [], []
    return [row["step"] for row in rows], [math.nan if value is None else float(value) for value in values]


def marker(x: Sequence[int]) -> str:
    return "o" if len(x) <= MARKER_STEPS else ""


def running_mean(values: Sequence[float], count: int) -> list[float]:
    """Return the mean of each value and up to `count - 1` before it, gaps left out."""
    windows = [values[max(0, end - count) : end] for end in range(1, len(values) + 1)]
    known = [[value for value in window if not math.isnan(value)] for window in windows]
    return [sum(window) / len(window) if window else math.nan for window in known]
