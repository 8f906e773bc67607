"""What jobs that are over leave on the disk."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from parallm.errors import ParallmError
from parallm.jobs.fine_tuning import HELD_OUT, TRAIN, TuningOrder, TuningResult
from parallm.jobs.job_rows import SavedVersion
from parallm.jobs.jobs import Jobs, open_jobs
from parallm.jobs.settings import JobSettings
from tests.jobs.test_job_events import REQUEST

RESULT = TuningResult(was_stopped=True, trained_tokens=1, rows=[])


def fill(folder: Path) -> None:
    """Write what a job at work has in its folder."""
    (folder / "step_000001").mkdir(parents=True)
    for name in (TRAIN, HELD_OUT, "run.log", "metrics.jsonl", "step_000001/adapter.safetensors"):
        (folder / name).write_text("x")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


async def run(jobs: Jobs, train: Callable[[TuningOrder], object], is_reached: Callable[[], bool]) -> None:
    """Run jobs, each with the end that `train` brings about, until then."""

    async def work(order: TuningOrder) -> TuningResult:
        fill(order.folder)
        train(order)
        await asyncio.sleep(0.01)
        (order.folder / "step_000002").mkdir()  # a job saves the step in which it was stopped
        return RESULT

    running = asyncio.create_task(jobs.tuning.run(work))
    for _ in range(2000):
        await asyncio.sleep(0.001)
        if is_reached():
            break
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("is_at_work", [False, True])
def test_a_cancelled_job_leaves_no_folder(tmp_path: Path, is_at_work: bool) -> None:
    with open_jobs(JobSettings(enabled=True), tmp_path, base="nano") as jobs:
        job_id = jobs.tuning.create(REQUEST, "", None).id
        folder = jobs.tuning.folder(job_id)

        async def cancel() -> None:
            jobs.tuning.cancel(job_id, None)
            await jobs.tuning.clean_up(job_id)

        if is_at_work:
            tasks: list[asyncio.Task[None]] = []

            def act(order: TuningOrder) -> None:
                tasks.append(asyncio.create_task(cancel()))

            asyncio.run(run(jobs, act, lambda: bool(tasks) and not folder.exists()))
        else:
            fill(folder)
            asyncio.run(cancel())
        assert not folder.exists()


def test_the_next_process_deletes_what_a_killed_one_has_left_of_a_cancelled_job(tmp_path: Path) -> None:
    with open_jobs(JobSettings(enabled=True), tmp_path, base="nano") as jobs:
        cancelled, paused = (jobs.tuning.create(REQUEST, "", None).id for _ in range(2))
        for job_id in (cancelled, paused):
            fill(jobs.tuning.folder(job_id))
        jobs.tuning.cancel(cancelled, None)
        jobs.tuning.pause(paused, None)
        (tmp_path / "runs" / "mine").mkdir()
    with open_jobs(JobSettings(enabled=True), tmp_path, base="nano") as jobs:
        asyncio.run(run(jobs, lambda order: None, lambda: not jobs.tuning.folder(cancelled).exists()))
        assert names(tmp_path / "runs") == {paused, "mine"}
        assert TRAIN in names(jobs.tuning.folder(paused))


def test_a_failed_job_keeps_its_log_and_metrics_alone(tmp_path: Path) -> None:
    with open_jobs(JobSettings(enabled=True), tmp_path, base="nano") as jobs:
        job_id = jobs.tuning.create(REQUEST, "", None).id
        folder = jobs.tuning.folder(job_id)

        def fail(order: TuningOrder) -> None:
            order.listener.saved([SavedVersion(step=1, version=1)])
            raise ParallmError("it cannot be trained")

        asyncio.run(run(jobs, fail, lambda: names(folder) == {"run.log", "metrics.jsonl"}))
        assert jobs.tuning.get(job_id, None).status == "failed"
        assert names(folder) == {"run.log", "metrics.jsonl"}
        assert jobs.tuning.checkpoints(job_id, None, after=None, limit=9).records == []
