"""What rank 0 records of a run that other workers share."""

from pathlib import Path

import pytest

from parallm.distributed.recorder import SharedRecorder
from parallm.metrics.settings import MetricsSettings


@pytest.mark.parametrize("has_failed", [False, True])
def test_no_curves_are_drawn_while_the_next_gang_waits(tmp_path: Path, has_failed: bool) -> None:
    drawn: list[str] = []
    settings = MetricsSettings(display="off", wandb="off")
    recorder = SharedRecorder(tmp_path, settings, {}, dict, has_failed=lambda: has_failed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parallm.metrics.record.draw_curves", lambda *_, title, **__: drawn.append(title))
        recorder.finish("run")
    assert drawn == ([] if has_failed else ["run"])
    assert (tmp_path / "summary.json").is_file()
