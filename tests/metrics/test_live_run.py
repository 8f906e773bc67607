"""What happens to a run beside its steps is noted once, and told to those who watch."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallm.metrics.happenings import Happenings
from parallm.metrics.live_run import LiveRun
from parallm.metrics.news import News
from parallm.reports import TrainingStatus


def watched(folder: Path, news: News) -> LiveRun:
    run = LiveRun("policy", news, None)
    run.load(folder)
    run.status = lambda: TrainingStatus(state="collecting", step=len(run.history))
    run.note_in(Happenings(folder, "policy", lambda: len(run.history)))
    return run


def kinds(run: LiveRun) -> list[tuple[str, int]]:
    assert run.happenings is not None
    return [(row["kind"], row["step"]) for row in run.happenings.rows()]


def test_the_life_of_a_run_is_noted(tmp_path: Path) -> None:
    run = watched(tmp_path, News())
    run.step({"step": 1, "guard/rollbacks": 0, "faults/total": 0})
    run.step({"step": 2, "guard/rollbacks": 1, "faults/total": 2})
    run.evaluation({"step": 2, "heldout/version": 2, "heldout/accuracy": 0.625})
    status = run.status()
    for changed in (
        {"checkpoint_saves": 1},
        {"checkpoint_saves": 1, "state": "paused"},
        {"checkpoint_saves": 1, "state": "failed", "message": "the disk is full"},
        {"checkpoint_saves": 1, "state": "failed", "message": "the disk is full"},
    ):
        now = replace(status, **changed)
        run.status = lambda now=now: now  # type: ignore[misc]
        run.tell_status()
    expected = [("started", 0), ("guard_rollback", 2), ("fault", 2), ("evaluated", 2), ("saved", 2), ("failed", 2)]
    assert kinds(run) == expected
    assert run.happenings is not None
    texts = {row["kind"]: row["text"] for row in run.happenings.rows()}
    assert texts["evaluated"] == "version 2: held-out accuracy 62.5%"
    assert texts["failed"] == "the disk is full"


def test_a_run_that_goes_on_says_so_and_keeps_what_was_noted(tmp_path: Path) -> None:
    watched(tmp_path, News())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1}\n')
    assert kinds(watched(tmp_path, News())) == [("started", 0), ("resumed_run", 1)]


def test_happenings_are_told(tmp_path: Path) -> None:
    async def run() -> list[Any]:
        news = News()
        live = watched(tmp_path, news)
        with news.watch() as watcher:
            live.evaluation({"step": 0, "heldout/version": 0, "heldout/loss": 1.5})
            events = [await watcher.next(1) for _ in range(2)]
        return [event and json.loads(event.text.partition(b"data: ")[2]) for event in events]

    evaluation, happening = asyncio.run(run())
    assert evaluation["heldout/loss"] == 1.5
    assert (happening["kind"], happening["text"], happening["policy"]) == (
        "evaluated",
        "version 0: held-out loss 1.50",
        "policy",
    )
