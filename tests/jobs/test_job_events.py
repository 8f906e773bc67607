"""What jobs note outlives their process, and a client's word that comes while a job begins or ends holds."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from parallm.jobs import fine_tuning
from parallm.jobs.fine_tuning import ATTEMPTS, TuningOrder, TuningResult
from parallm.jobs.job_rows import JobListener, JobRows, SavedVersion
from parallm.jobs.jobs import Jobs, open_jobs
from parallm.jobs.plan import ReinforcementHyperparameters, TuningRequest
from parallm.jobs.settings import JobSettings
from parallm.jobs.store import JobStore

REQUEST = TuningRequest(
    model="base",
    training_file="",
    kind="reinforcement",
    grader={"type": "environment", "name": "arithmetic"},
    hyperparameters=ReinforcementHyperparameters(),
    seed=1,
)
RESULT = TuningResult(was_stopped=False, trained_tokens=1, rows=[])
END = {"cancel": "cancelled", "pause": "paused"}


async def train(order: TuningOrder) -> TuningResult:
    return RESULT


def test_a_checkpoint_that_a_kill_left_without_a_note_has_its_metrics(tmp_path: Path) -> None:
    with open_jobs(JobSettings(enabled=True), tmp_path, base="nano") as jobs:
        job_id = jobs.tuning.create(REQUEST, "", None).id
        listener = JobListener(jobs.tuning._rows, job_id, "sums")
        listener.stepped({"step": 3, "train_loss": 0.5})
        listener.evaluated({"step": 3, "valid_accuracy": 0.25})
    with open_jobs(JobSettings(enabled=True), tmp_path, base="nano") as jobs:
        JobListener(jobs.tuning._rows, job_id, "sums").saved([SavedVersion(step=3, version=4)])
        (checkpoint,) = jobs.tuning.checkpoints(job_id, None, after=None, limit=9).records
        assert (checkpoint.metrics.train_loss, checkpoint.metrics.valid_accuracy) == (0.5, 0.25)


def test_an_event_that_is_noted_again_keeps_its_time_unless_it_says_something_else(tmp_path: Path) -> None:
    store, now = JobStore(tmp_path / "jobs.sqlite"), 100.0
    rows = JobRows(store, lambda: now)

    def noted() -> tuple[str, int]:
        (event,) = rows.events.all(("ftjob-1",))
        return event.message, event.created_at

    rows.tell("ftjob-1", "step-1", "a")
    now = 200.0
    rows.tell("ftjob-1", "step-1", "a")
    assert noted() == ("a", 100)
    rows.tell("ftjob-1", "step-1", "b")
    assert noted() == ("b", 200)
    store.close()


async def until(jobs: Jobs, is_reached: Callable[[], bool]) -> None:
    """Run jobs until then, and let what has begun end."""
    running = asyncio.create_task(jobs.tuning.run(train))
    while not is_reached():
        await asyncio.sleep(0.001)
    await jobs.tuning.close(10)
    jobs.tuning._changed.set()
    await running


@pytest.mark.parametrize("act", END)
def test_what_a_client_says_while_a_job_begins_holds(act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note, noted = fine_tuning._note_attempt, asyncio.Event()

    async def run(jobs: Jobs, job_id: str) -> None:
        loop = asyncio.get_running_loop()

        def note_late(file: Path, step: int) -> bool:
            may_begin, acted = note(file, step), threading.Event()
            loop.call_soon_threadsafe(getattr(jobs.tuning, act), job_id, None)
            loop.call_soon_threadsafe(acted.set)
            assert acted.wait(10)
            loop.call_soon_threadsafe(noted.set)
            return may_begin

        monkeypatch.setattr(fine_tuning, "_note_attempt", note_late)
        await until(jobs, lambda: noted.is_set())

    with open_jobs(JobSettings(enabled=True), tmp_path, base="nano") as jobs:
        job_id = jobs.tuning.create(REQUEST, "", None).id
        asyncio.run(run(jobs, job_id))
        assert jobs.tuning.get(job_id, None).status == END[act]
        assert not (jobs.tuning.folder(job_id) / ATTEMPTS).exists()


@pytest.mark.parametrize("act", END)
def test_what_a_client_says_while_a_job_ends_holds(act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_jobs(JobSettings(enabled=True), tmp_path, base="nano") as jobs:
        job_id, acted, forgotten = jobs.tuning.create(REQUEST, "", None).id, list[str](), list[str]()
        jobs.tuning.unload = forgotten.append

        def results(rows: object) -> str:
            getattr(jobs.tuning, act)(job_id, None)
            acted.append(act)
            return "step\n"

        monkeypatch.setattr(fine_tuning, "_csv", results)
        asyncio.run(until(jobs, lambda: bool(acted)))
        assert jobs.tuning.get(job_id, None).status == END[act]
        assert bool(forgotten) == (act == "cancel")
        assert jobs.files.page(owner=None, purpose=None, after=None, limit=9, newest_first=True).records == []
