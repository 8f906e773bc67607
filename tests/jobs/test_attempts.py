"""A job that ends its process each time fails in the end; one that gets further, or ends by itself, does not."""

import asyncio
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from parallm.jobs.fine_tuning import ATTEMPTS, MAX_ATTEMPTS, TuningOrder, TuningResult
from parallm.jobs.job_rows import SavedVersion
from parallm.jobs.jobs import open_jobs
from parallm.jobs.plan import ReinforcementHyperparameters, TuningRequest
from parallm.jobs.records import FineTuningJob
from parallm.jobs.settings import JobSettings

LINE = {"messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2"}]}


def first_process(folder: Path) -> str:
    """Hand a job in, and return its id."""
    with open_jobs(JobSettings(enabled=True), folder, base="nano") as jobs:
        file = jobs.files.add(io.BytesIO(f"{json.dumps(LINE)}\n".encode()), name="a", purpose="fine-tune", owner="")
        request = TuningRequest(
            model="base",
            training_file=file.id,
            kind="supervised",
            hyperparameters=ReinforcementHyperparameters(),
            seed=1,
        )
        return jobs.tuning.create(request, "", None).id


async def next_process(folder: Path, job_id: str, work: Callable[[TuningOrder], None], killed: Path) -> FineTuningJob:
    """Run jobs until this one has begun or failed, and leave in `killed` what a kill would leave at this point."""
    begun = asyncio.Event()

    async def train(order: TuningOrder) -> TuningResult:
        work(order)
        shutil.copytree(folder, killed)
        begun.set()
        return await asyncio.Future()

    with open_jobs(JobSettings(enabled=True), folder, base="nano") as jobs:
        running = asyncio.create_task(jobs.tuning.run(train))
        while not begun.is_set() and jobs.tuning.get(job_id, None).status != "failed":
            await asyncio.sleep(0.001)
        job = jobs.tuning.get(job_id, None)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return job


def save(order: TuningOrder) -> None:
    """Note a checkpoint that replaces the one before, as with `checkpoint.keep=1`."""
    step = order.listener._rows.saved_step(order.job_id) + 1
    order.listener.saved([SavedVersion(step=step, version=step)])


@pytest.mark.parametrize(("work", "fails"), [(lambda order: None, True), (save, False)])
def test_a_job_fails_that_has_ended_its_process_too_often(
    tmp_path: Path, work: Callable[[TuningOrder], None], fails: bool
) -> None:
    job_id = first_process(tmp_path / "0")
    processes = MAX_ATTEMPTS if fails else 2 * MAX_ATTEMPTS
    for number in range(processes):
        job = asyncio.run(next_process(tmp_path / f"{number}", job_id, work, tmp_path / f"{number + 1}"))
        assert job.status == "running"
    last = asyncio.run(next_process(tmp_path / f"{processes}", job_id, work, tmp_path / "end"))
    assert (last.status == "failed") == fails
    if fails:
        assert last.error is not None
        assert str(MAX_ATTEMPTS) in last.error.message


def test_an_attempt_that_ends_before_its_process_does_not_count(tmp_path: Path) -> None:
    job_id = first_process(tmp_path / "jobs")
    for number in range(3):
        asyncio.run(next_process(tmp_path / "jobs", job_id, lambda order: None, tmp_path / f"{number}"))
        assert not (tmp_path / "jobs" / "runs" / job_id / ATTEMPTS).exists()
        assert json.loads((tmp_path / f"{number}" / "runs" / job_id / ATTEMPTS).read_text()) == [0, 1]
