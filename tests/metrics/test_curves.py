"""curves.png is a picture, whatever the run has left."""

from pathlib import Path
from typing import Any

import pytest

from parallm.metrics.curves import draw_curves

STEP = {"step": 1, "reward/mean": 0.5, "update/kl_to_behaviour": None, "completion/length_mean": 60.0}
EVALUATION = {"step": 0, "heldout/accuracy": 0.3, "heldout/low": 0.26, "heldout/high": 0.34}


@pytest.mark.parametrize(
    ("steps", "evaluations"),
    [
        ([], []),
        ([STEP], []),
        ([STEP], [EVALUATION]),
        ([{**STEP, "step": step} for step in range(100)], [EVALUATION]),
        ([{**STEP, "reward/mean": -3.0}], [EVALUATION]),
        ([{**STEP, "reward/mean": None}], [{"step": 0, "heldout/accuracy": None}]),
        ([{"step": 1, "update/loss": 1.5}], [{"step": 0, "heldout/loss": 1.7}]),
        ([{**STEP, "update/gradient_norm": 0.0, "completion/truncated_fraction": 0.5}], []),
    ],
)
def test_a_picture_is_written(tmp_path: Path, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    draw_curves(steps, evaluations, file=tmp_path / "curves.png", title="run")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]
