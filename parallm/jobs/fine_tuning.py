"""Fine-tuning jobs: a queue of rows, of which one at a time is trained, and what clients see of it.

Whatever a job does is noted before the next thing begins, and noting it twice changes nothing: ids of events and
checkpoints follow from job and step. So a process that starts again goes on with the job that was running, from its
last checkpoint, and its end is counted once.
"""

import asyncio
import json
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from parallm.errors import InvalidRequest, NotStored, ParallmError, ProblemError, UnknownObject
from parallm.jobs.files import FileStore
from parallm.jobs.graders import EnvironmentGrader, read_grader
from parallm.jobs.job_rows import JobListener, JobRows
from parallm.jobs.plan import TuningRequest, asked, method_of, tuned_name
from parallm.jobs.records import (
    OPEN_JOBS,
    FineTuningJob,
    JobCheckpoint,
    JobError,
    JobEvent,
    new_id,
)
from parallm.jobs.store import JobStore, Page
from parallm.jobs.training_files import read_problems, write_demonstrations
from parallm.metrics.json_lines import write_whole

TRAIN, HELD_OUT, START = "train.jsonl", "held_out.jsonl", "start"
"""In a job's folder: what it learns and is evaluated on, and the adapter that it starts from."""
NOT_KEPT = (TRAIN, HELD_OUT, START, "step_*", "aside_step_*")
"""Files and folders that a failed job loses; its log and its metrics stay."""
COLUMNS = ("step", "train_loss", "train_mean_reward", "valid_loss", "valid_mean_reward", "valid_accuracy")
"""Columns of the result file."""
DISK_SECONDS = 10.0
ATTEMPTS, MAX_ATTEMPTS = "attempts.json", 8
"""File in a job's folder, and how many processes may end in a job without one further checkpoint until it has failed:
one that takes the server with it, by memory say, would end every next one."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningOrder:
    """One job for the trainer."""

    job_id: str
    name: str
    """The adapter to make versions of."""
    request: TuningRequest
    folder: Path
    """The run folder, which may hold checkpoints of this job; `TRAIN` and `HELD_OUT` are there."""
    training_file: Path | None
    validation_file: Path | None
    listener: JobListener
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to end training after the present step, which is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    was_stopped: bool
    trained_tokens: int
    rows: list[Mapping[str, Any]]
    """One for each step, under the names of `COLUMNS`."""


Train = Callable[[TuningOrder], Coroutine[Any, Any, TuningResult]]
"""Trains until the end or until `stop` is set. Raises ParallmError. The model answers by then under its name."""


class FineTuning:
    """Used on the event loop."""

    def __init__(
        self,
        store: JobStore,
        files: FileStore,
        folder: Path,
        *,
        base: str,
        environments: frozenset[str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`base` is the model's path, for names of models; `environments` are those that a grader may name."""
        self._rows = JobRows(store, clock)
        self._files = files
        self._folder = folder
        self._base = base
        self._environments = environments
        self._clock = clock
        self._changed = asyncio.Event()
        self._running: TuningOrder | None = None
        self._at_work: str | None = None  # the job whose files are checked, or that is trained
        self._is_closing = False
        self.unload: Callable[[str], None] = lambda name: None
        """Forgets a model that will not be asked any more."""

    def has_open(self) -> bool:
        """Return whether a job is not over."""
        return bool(self._rows.jobs.page(groups=OPEN_JOBS, limit=1).records)

    def reader_of(self, file_id: str) -> str | None:
        """Return the open job that reads this file."""
        jobs = self._rows.jobs.all(OPEN_JOBS)
        return next((job.id for job in jobs if file_id in (job.training_file, job.validation_file)), None)

    def create(self, request: TuningRequest, owner: str, visible_to: str | None) -> FineTuningJob:
        """Raises InvalidRequest, UnknownObject."""
        self._check(request, visible_to)
        job = FineTuningJob(
            id=new_id("ftjob-"),
            created_at=int(self._clock()),
            model=request.model,
            training_file=request.training_file,
            validation_file=request.validation_file,
            method=method_of(request, asked(request)),
            hyperparameters=asked(request),
            seed=request.seed,
            metadata=request.metadata,
        )
        with self._rows.changing():
            self._rows.jobs.add(job, owner=owner, group=job.status, request=request.model_dump_json())
            self._rows.tell(job.id, "created", f"Created fine-tuning job: {job.id}")
        self._changed.set()
        return job

    def get(self, name: str, owner: str | None) -> FineTuningJob:
        """Raises UnknownObject."""
        return self._rows.jobs.get(name, owner)

    def page(self, *, owner: str | None, after: str | None, limit: int) -> Page[FineTuningJob]:
        """Raises UnknownObject."""
        return self._rows.jobs.page(owner=owner, after=after, limit=limit)

    def events(self, name: str, owner: str | None, *, after: str | None, limit: int) -> Page[JobEvent]:
        """Raises UnknownObject."""
        self._rows.jobs.get(name, owner)
        return self._rows.events.page(groups=(name,), after=after, limit=limit)

    def checkpoints(self, name: str, owner: str | None, *, after: str | None, limit: int) -> Page[JobCheckpoint]:
        """Raises UnknownObject."""
        self._rows.jobs.get(name, owner)
        return self._rows.checkpoints.page(groups=(name,), after=after, limit=limit)

    def cancel(self, name: str, owner: str | None) -> FineTuningJob:
        """End a job for good; its checkpoints are forgotten. Call `clean_up` next. Raises UnknownObject,
        InvalidRequest."""
        job = self._open(name, owner, "cancel")
        with self._rows.changing():
            job = self._rows.put(job, "cancelled", finished_at=int(self._clock()), estimated_finish=None)
            self._rows.tell(job.id, "cancelled", "The job was cancelled")
            self._rows.forget_checkpoints(job.id)
        if not self._stop(job.id):
            self.unload(self.model_name(job))
        return job

    def pause(self, name: str, owner: str | None) -> FineTuningJob:
        """Let a job end its present step, and others go first until `resume`. Raises UnknownObject, InvalidRequest."""
        job = self._open(name, owner, "pause")
        if job.status == "paused":
            raise InvalidRequest(f"{job.id} is paused already", "fine_tuning_job_id")
        with self._rows.changing():
            job = self._rows.put(job, "paused", estimated_finish=None)
            self._rows.tell(job.id, new_id("paused-"), "The job was paused")
        self._stop(job.id)
        return job

    def resume(self, name: str, owner: str | None) -> FineTuningJob:
        """Put a paused job back into the queue, at the place of its creation. Raises UnknownObject, InvalidRequest."""
        job = self._open(name, owner, "resume")
        if job.status != "paused":
            raise InvalidRequest(f"{job.id} is {job.status}, not paused", "fine_tuning_job_id")
        # its files are checked again, since it may have been paused before they were
        with self._rows.changing():
            job = self._rows.put(job, "validating_files")
            self._rows.tell(job.id, new_id("resumed-"), "The job was resumed")
        self._changed.set()
        return job

    async def forget(self, name: str) -> None:
        """Delete the checkpoints of the job that has made this model, if one has, so that no restart serves it."""
        for job in self._rows.jobs.all(("succeeded",)):
            if job.fine_tuned_model == name:
                self._rows.forget_checkpoints(job.id)
                await asyncio.to_thread(shutil.rmtree, self.folder(job.id), ignore_errors=True)

    async def clean_up(self, job_id: str) -> None:
        """Delete the folder of a cancelled job, and data and checkpoints of a failed one; `run` does so for a job that
        is at work."""
        if job_id == self._at_work:
            return
        status, folder = self._rows.jobs.get(job_id).status, self.folder(job_id)
        if status == "cancelled":
            await asyncio.to_thread(_delete, [folder])
        elif status == "failed":
            await asyncio.to_thread(_delete, [path for pattern in NOT_KEPT for path in folder.glob(pattern)])

    def succeeded(self) -> list[tuple[str, Path]]:
        """Return name and run folder of each model that a job has made."""
        jobs = self._rows.jobs.all(("succeeded",))
        return [(job.fine_tuned_model, self.folder(job.id)) for job in jobs if job.fine_tuned_model is not None]

    def model_name(self, job: FineTuningJob) -> str:
        return tuned_name(self._base, self._rows.request(job).suffix, job.id)

    def folder(self, job_id: str) -> Path:
        return self._folder / job_id

    async def run(self, train: Train) -> None:
        """Check and train jobs until it is cancelled: the one that an earlier process has left, then the oldest."""
        for folder in list(self._folder.glob("*")):
            with suppress(UnknownObject):
                await self.clean_up(folder.name)
        while not self._is_closing:
            self._changed.clear()
            try:
                job = self._next()
                if job is None:
                    await self._changed.wait()
                else:
                    await self._work_on(job, train)
            except NotStored as error:
                logger.error("jobs wait, since the disk does not take what they report: %s", error)
                await asyncio.sleep(DISK_SECONDS)

    def _next(self) -> FineTuningJob | None:
        """Return the oldest job to check, else the one to train."""
        for status in ("validating_files", "running", "queued"):
            if jobs := self._rows.jobs.page(groups=(status,), limit=1, newest_first=False).records:
                return jobs[0]
        return None

    async def _work_on(self, job: FineTuningJob, train: Train) -> None:
        self._at_work = job.id
        try:
            if job.status == "validating_files":
                await self._validate(job)
            else:
                await self._train(job, train)
        finally:
            self._at_work = None
        await self.clean_up(job.id)

    async def close(self, seconds: float) -> None:
        """Let the present job end its step and save, within `seconds`; it goes on when the server starts again."""
        order, self._is_closing = self._running, True
        if order is not None:
            order.stop.set()
            until = asyncio.get_running_loop().time() + seconds
            while self._running is order and asyncio.get_running_loop().time() < until:
                await asyncio.sleep(0.02)

    async def _validate(self, job: FineTuningJob) -> None:
        request, folder = self._rows.request(job), self.folder(job.id)
        if job.training_file:
            self._rows.tell(job.id, "validating", f"Validating training file: {job.training_file}")
        for name, file_id in (("training_file", job.training_file), ("validation_file", job.validation_file)):
            if not file_id:
                continue
            try:
                path = self._files.path(self._files.get(file_id))
                target = folder / (TRAIN if name == "training_file" else HELD_OUT)
                await asyncio.to_thread(_check_file, request, path, target)
            except NotStored:
                raise
            except Exception as error:  # whatever a file brings about, it ends its own job alone
                if not isinstance(error, ParallmError):
                    logger.exception("%s of job %s cannot be read", name, job.id)
                reason = str(error) if isinstance(error, ParallmError) else f"it cannot be read: {error!r:.200}"
                if self._rows.jobs.get(job.id).status == "validating_files":
                    self._fail(self._rows.jobs.get(job.id), f"invalid_{name}", f"{file_id}: {reason}", name)
                return
        if self._rows.jobs.get(job.id).status == "validating_files":
            with self._rows.changing():
                self._rows.put(self._rows.jobs.get(job.id), "queued")
                self._rows.tell(job.id, "queued", "Files validated, moving job to queued state")

    async def _train(self, job: FineTuningJob, train: Train) -> None:
        try:
            order = TuningOrder(
                job_id=job.id,
                name=self.model_name(job),
                request=self._rows.request(job),
                folder=self.folder(job.id),
                training_file=self._path(job.training_file),
                validation_file=self._path(job.validation_file),
                listener=JobListener(self._rows, job.id, self.model_name(job)),
            )
        except UnknownObject as missing:
            self._fail(job, "invalid_training_file", f"its file is gone: {missing}", "training_file")
            return
        attempts = order.folder / ATTEMPTS
        step = self._rows.saved_step(job.id)
        may_begin = await asyncio.to_thread(_note_attempt, attempts, step)
        job = self._rows.jobs.get(job.id)
        if job.status not in ("queued", "running"):  # cancelled or paused meanwhile
            await asyncio.to_thread(attempts.unlink, missing_ok=True)
            return
        if not may_begin:
            message = f"{MAX_ATTEMPTS} processes ended in this job since its checkpoint of step {step}; see the log"
            self._fail(job, "server_error", message, None)
            return
        with self._rows.changing():
            self._rows.put(job, "running")
            self._rows.tell(job.id, "started", "Fine-tuning job started")
        self._running = order
        training = asyncio.create_task(train(order))
        try:
            await asyncio.wait((training,))
        finally:
            training.cancel()
            await asyncio.wait((training,))
            self._running = None
            await asyncio.to_thread(attempts.unlink, missing_ok=True)
        error = training.exception()
        if error is None:
            await self._finish(job.id, order, training.result())
        elif isinstance(error, ParallmError):
            self._end_with(job.id, "training_failed", str(error))
        else:
            logger.error("job %s has failed", job.id, exc_info=error)
            message = f"the server failed to train, its log has the cause: {type(error).__name__}"
            self._end_with(job.id, "server_error", message)
        if self._rows.jobs.get(job.id).status in ("cancelled", "failed"):
            self.unload(order.name)

    async def _finish(self, job_id: str, order: TuningOrder, result: TuningResult) -> None:
        if result.was_stopped or self._rows.jobs.get(job_id).status != "running":
            return  # cancelled, paused, or to be gone on with by the next process
        file_id = f"file-{job_id.partition('-')[2]}"
        results = order.folder / "step_metrics.csv"
        await asyncio.to_thread(results.write_text, _csv(result.rows))
        await asyncio.to_thread(
            self._files.adopt,
            results,
            file_id,
            name=f"{job_id}_step_metrics.csv",
            purpose="fine-tune-results",
            owner=self._rows.jobs.owner(job_id),
            expires_after=None,
        )
        job = self._rows.jobs.get(job_id)
        if job.status != "running":  # cancelled or paused meanwhile
            await asyncio.to_thread(self._files.delete, file_id, None)
            return
        with self._rows.changing():  # the end of a job is one change
            self._rows.put(
                job,
                "succeeded",
                fine_tuned_model=order.name,
                finished_at=int(self._clock()),
                estimated_finish=None,
                trained_tokens=result.trained_tokens,
                result_files=[file_id],
            )
            self._rows.tell(job_id, "model", f"New fine-tuned model created: {order.name}")
            self._rows.tell(job_id, "succeeded", "The job has successfully completed")

    def _end_with(self, job_id: str, code: str, message: str) -> None:
        job = self._rows.jobs.get(job_id)
        if job.status == "running":
            self._fail(job, code, message, None)

    def _fail(self, job: FineTuningJob, code: str, message: str, param: str | None) -> None:
        error = JobError(code=code, message=message, param=param)
        with self._rows.changing():
            self._rows.put(job, "failed", error=error, finished_at=int(self._clock()), estimated_finish=None)
            self._rows.forget_checkpoints(job.id)
            self._rows.tell(job.id, "failed", f"The job failed: {message}", level="error")

    def _check(self, request: TuningRequest, visible_to: str | None) -> None:
        grader = None if request.grader is None else read_grader(request.grader)
        if isinstance(grader, EnvironmentGrader):
            if grader.name not in self._environments:
                known = ", ".join(sorted(self._environments)) or "none"
                raise InvalidRequest(
                    f"no environment {grader.name[:100]!r} is registered; there are {known} (jobs.environments)",
                    "method.reinforcement.grader.name",
                )
            for name in ("training_file", "validation_file"):
                if getattr(request, name):
                    raise InvalidRequest(f"an environment has problems of its own; leave {name} out, or empty", name)
            return
        for name in ("training_file", "validation_file"):
            file_id = getattr(request, name)
            if name == "training_file" and not file_id:
                raise InvalidRequest("training_file is missing; upload one with purpose=fine-tune", name)
            if file_id:
                file = self._files.get(file_id, visible_to)
                if file.purpose != "fine-tune":
                    raise InvalidRequest(f"{file.id} has the purpose {file.purpose}; upload it with fine-tune", name)

    def _open(self, name: str, owner: str | None, act: Literal["cancel", "pause", "resume"]) -> FineTuningJob:
        job = self._rows.jobs.get(name, owner)
        if job.status not in OPEN_JOBS:
            raise InvalidRequest(f"{job.id} is {job.status}, so there is nothing to {act}", "fine_tuning_job_id")
        return job

    def _stop(self, job_id: str) -> bool:
        """Stop the job if it is at work, and return whether it is."""
        self._changed.set()
        if self._running is None or self._running.job_id != job_id:
            return False
        self._running.stop.set()
        return True

    def _path(self, file_id: str | None) -> Path | None:
        return self._files.path(self._files.get(file_id)) if file_id else None


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def new_seed() -> int:
    return secrets.randbelow(2**31)


def _note_attempt(file: Path, step: int) -> bool:
    """Count an attempt at a job whose newest checkpoint is that of `step`, and return whether it may be made.

    The file is gone after attempts that end before their process does. Raises NotStored.
    """
    try:
        known, count = json.loads(file.read_text())
    except (OSError, ValueError, TypeError):
        known, count = step, 0
    count = count + 1 if known == step else 1
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps([step, count]))
    except OSError as error:
        raise NotStored(f"{file} cannot be written: {error}") from error
    return bool(count <= MAX_ATTEMPTS)


def _check_file(request: TuningRequest, path: Path, target: Path) -> None:
    """Raise ProblemError for a file that cannot be learned from. Demonstrations are written to `target`."""
    try:
        if request.kind == "supervised":
            target.parent.mkdir(parents=True, exist_ok=True)
            write_demonstrations(path, target)
        else:
            assert request.grader is not None, "a reinforcement job has a grader"
            read_problems(path, read_grader(request.grader), "train")
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemError(f"it cannot be read: {error}") from error


def _csv(rows: list[Mapping[str, Any]]) -> str:
    lines = [",".join(COLUMNS), *(",".join(_cell(row.get(name)) for name in COLUMNS) for row in rows)]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    return "" if value is None else str(value)
