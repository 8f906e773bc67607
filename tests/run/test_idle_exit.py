"""What keeps a server up that ends when it is idle."""

import asyncio
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parallm.jobs.jobs import Jobs, open_jobs
from parallm.jobs.plan import ReinforcementHyperparameters, TuningRequest
from parallm.jobs.settings import JobSettings
from parallm.run.serve import Serving, _until_idle
from parallm.server.jobs.schemas import BatchBody
from parallm.server.operation.middleware import Drain
from tests.jobs.conftest import COMPLETIONS, lines


def serving_of(jobs: Jobs | None) -> Any:
    """A server whose engine has nothing to do and whom no client asks."""
    engine = SimpleNamespace(stats=lambda: SimpleNamespace(num_running=0))
    app = SimpleNamespace(state=SimpleNamespace(drain=Drain()))
    parts: Any = {"runtime": SimpleNamespace(engine=engine), "application": SimpleNamespace(app=app)}
    return Serving(**parts, messages=[], jobs=jobs)


def ends(jobs: Jobs | None, seconds: float = 0.3) -> bool:
    """Whether a server that may be idle for 0.02 s ends within `seconds`."""

    async def main() -> bool:
        try:
            return await asyncio.wait_for(_until_idle(0.02, serving_of(jobs)), seconds)
        except TimeoutError:
            return False

    return asyncio.run(main())


def test_batches_and_jobs_keep_a_server_up_until_they_are_over(tmp_path: Path) -> None:
    assert ends(None, 10)
    with open_jobs(JobSettings(enabled=True), tmp_path / "jobs", base="nano") as jobs:
        assert ends(jobs, 10)
        file = jobs.files.add(io.BytesIO(lines(["a"])), name="a", purpose="batch", owner="")
        body = BatchBody(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        batch = jobs.batches.create(body, "", None)
        assert not ends(jobs)
        jobs.batches._put(batch, "completed")
        assert ends(jobs, 10)
        data = jobs.files.add(io.BytesIO(b"{}"), name="b", purpose="fine-tune", owner="")
        request = TuningRequest(
            model="base",
            training_file=data.id,
            kind="supervised",
            hyperparameters=ReinforcementHyperparameters(),
            seed=0,
        )
        job = jobs.tuning.create(request, "", None)
        assert not ends(jobs)
        jobs.tuning.cancel(job.id, None)
        assert ends(jobs, 10)


def test_a_request_at_work_keeps_a_server_up(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = serving_of(None)
    monkeypatch.setattr(serving.runtime.engine, "stats", lambda: SimpleNamespace(num_running=1))
    assert serving.idle_seconds() < 0.02
