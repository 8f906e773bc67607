"""What happens to a run is kept with time and step, over a restart and a full disk."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallm.metrics.happenings import MAX_ROWS, Happenings


def test_a_happening_has_time_step_and_who(tmp_path: Path) -> None:
    seen: list[Mapping[str, Any]] = []
    happenings = Happenings(tmp_path, "policy", lambda: 7)
    happenings.tell = seen.append
    before = time.time()
    happenings.add("promoted", what="policy@3", by="me", text="promoted policy@3", values={"version": 3})
    happenings.add("fault", step=5, refused="no")
    first, second = happenings.rows()
    assert before <= first["time"] <= second["time"] <= time.time()
    assert {name: value for name, value in first.items() if name != "time"} == {
        "step": 7,
        "kind": "promoted",
        "what": "policy@3",
        "by": "me",
        "text": "promoted policy@3",
        "policy": "policy",
        "values": {"version": 3},
        "refused": None,
    }
    assert (second["step"], second["text"], second["refused"]) == (5, "fault", "no")
    assert seen == [first, second]


def test_a_run_that_goes_on_has_what_happened_before(tmp_path: Path) -> None:
    Happenings(tmp_path, "policy", lambda: 1).add("paused")
    again = Happenings(tmp_path, "policy", lambda: 2)
    again.add("resumed")
    assert [row["kind"] for row in again.rows()] == ["paused", "resumed"]
    assert [row["kind"] for row in again.rows(1)] == ["resumed"]
    assert again.rows(0) == ()
    lines = (tmp_path / "happenings.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_memory_has_the_newest(tmp_path: Path) -> None:
    happenings = Happenings(tmp_path / "missing", "policy", lambda: 0)  # the disk refuses all of them
    for number in range(MAX_ROWS + 1):
        happenings.add("saved", what=str(number))
    assert [happenings.rows()[0]["what"], happenings.rows()[-1]["what"]] == ["1", str(MAX_ROWS)]
