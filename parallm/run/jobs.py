"""The wiring of `jobs.*`: files, batches and fine-tuning jobs beside a model that is served."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from starlette.types import ASGIApp

from parallm.config.run_folder import RUNS_FOLDER
from parallm.config.schema import ServeConfig
from parallm.errors import ConfigError
from parallm.jobs.jobs import Jobs, open_jobs
from parallm.run.runtime import Runtime
from parallm.run.tuning import JobTrainer, usual_config
from parallm.server.jobs.routes_batches import asking

logger = logging.getLogger(__name__)


def check_jobs(config: ServeConfig) -> None:
    """Raise ConfigError for jobs in a process that is one of several, and for wrong keys of `jobs.training`."""
    if config.jobs.enabled and (config.distributed.workers > 1 or config.distributed.tensor_parallel > 1):
        raise ConfigError(
            "jobs.enabled=true: files and jobs belong to one process with a whole model; leave distributed.workers and "
            "distributed.tensor_parallel out"
        )
    usual_config(config)


@contextmanager
def opened_jobs(config: ServeConfig) -> Iterator[Jobs | None]:
    """Yield the jobs that `config` enables. Raises FolderInUse, NotStored."""
    if not config.jobs.enabled:
        yield None
        return
    folder = RUNS_FOLDER / config.name / "jobs" if config.jobs.folder is None else Path(config.jobs.folder).expanduser()
    with open_jobs(config.jobs, folder, base=config.model.path) as jobs:
        yield jobs


@asynccontextmanager
async def working(jobs: Jobs | None, config: ServeConfig, runtime: Runtime, app: ASGIApp) -> AsyncIterator[None]:
    """Answer batches through `app` and train jobs on `runtime` meanwhile. A job that runs saves at the end."""
    if jobs is None:
        yield
        return
    trainer = JobTrainer(runtime, usual_config(config), config.jobs)
    jobs.tuning.unload = trainer.unload
    await trainer.restore(jobs.tuning.succeeded())
    tasks = [
        asyncio.create_task(jobs.batches.run(asking(app)), name="batches"),
        asyncio.create_task(jobs.tuning.run(trainer), name="fine-tuning jobs"),
    ]
    for task in tasks:
        task.add_done_callback(_report)
    try:
        yield
    finally:
        await jobs.tuning.close(config.server.drain_seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s have ended until the server starts again", task.get_name(), exc_info=error)
