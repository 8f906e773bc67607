"""The rows of fine-tuning jobs with their events and checkpoints, and what a running job writes into them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from parallm.errors import UnknownObject
from parallm.jobs.plan import Plan, TuningRequest, method_of
from parallm.jobs.records import (
    CheckpointMetrics,
    FineTuningJob,
    JobCheckpoint,
    JobEvent,
    JobStatus,
    new_id,
)
from parallm.jobs.store import JobStore, Table

STEP, EVALUATION = "step", "evaluation"
"""Beginnings of the keys of events about one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedVersion:
    """A checkpoint on disk."""

    step: int
    version: int

    @property
    def alias(self) -> str:
        """Its name behind the model's and an @."""
        return f"ckpt-step-{self.step}"


class JobRows:
    """Noting a thing twice changes nothing: ids of events and checkpoints follow from job and step."""

    def __init__(self, store: JobStore, clock: Callable[[], float]) -> None:
        self.jobs = Table(store, "fine_tuning_jobs", FineTuningJob, "fine-tuning job")
        self.events = Table(store, "job_events", JobEvent, "event")
        self.checkpoints = Table(store, "job_checkpoints", JobCheckpoint, "checkpoint")
        self.clock = clock
        self._store = store

    def changing(self) -> AbstractContextManager[object]:
        """Make all changes inside, or none. Raises NotStored."""
        return self._store.changing()

    def request(self, job: FineTuningJob) -> TuningRequest:
        """Return what the job was asked for with."""
        return TuningRequest.model_validate_json(self.jobs.request(job.id))

    def put(self, job: FineTuningJob, status: JobStatus, **fields: Any) -> FineTuningJob:
        """Store the job with another status and other fields, and return it."""
        changed = job.model_copy(update={"status": status, **fields})
        self.jobs.put(changed, group=status)
        return changed

    def saved_step(self, job_id: str) -> int:
        """Return the step of the job's newest checkpoint that was noted; 0 without one."""
        return max((checkpoint.step_number for checkpoint in self.checkpoints.all((job_id,))), default=0)

    def forget_checkpoints(self, job_id: str) -> None:
        for checkpoint in self.checkpoints.all((job_id,)):
            self.checkpoints.delete(checkpoint.id)

    def data(self, job_id: str, key: str) -> dict[str, Any]:
        """Return the data of the event with this key; empty if there is none."""
        try:
            return self.events.get(_event_id(job_id, key)).data or {}
        except UnknownObject:
            return {}

    def tell(
        self,
        job_id: str,
        key: str,
        message: str,
        *,
        level: Literal["info", "warn", "error"] = "info",
        data: dict[str, Any] | None = None,
    ) -> None:
        """Add an event. A second one with this key replaces what the first says; one that says the same changes
        nothing."""
        event = JobEvent(
            id=_event_id(job_id, key),
            created_at=int(self.clock()),
            level=level,
            message=message,
            type="message" if data is None else "metrics",
            data=data,
        )
        with self.changing():
            self.events.add(event, owner="", group=job_id)
            noted = self.events.get(event.id)
            if event.model_copy(update={"created_at": noted.created_at}) != noted:
                self.events.put(event, group=job_id)


class JobListener:
    """Notes what a running job reports. Used on the event loop."""

    def __init__(self, rows: JobRows, job_id: str, name: str) -> None:
        self._rows = rows
        self._job_id = job_id
        self._name = name
        self._plan: Plan | None = None
        self._began: tuple[float, int] | None = None
        """Time and number of the first step of this process."""

    def planned(self, plan: Plan) -> None:
        """Note the numbers of the job."""
        self._plan = plan
        job = self._job()
        method = method_of(self._rows.request(job), plan.hyperparameters)
        self._put(job, hyperparameters=plan.hyperparameters, method=method)

    def resumed(self, step: int) -> None:
        self._rows.tell(self._job_id, new_id("goes-on-"), f"The job goes on after step {step}")

    def stepped(self, row: Mapping[str, Any]) -> None:
        """Note a finished step; `row` has names of `COLUMNS`."""
        step, now = int(row["step"]), self._rows.clock()
        self._began = self._began or (now, step)
        total = 0 if self._plan is None else self._plan.steps
        shown = ", ".join(f"{name.replace('_', ' ')}={value:.4g}" for name, value in _numbers(row).items())
        self._rows.tell(self._job_id, f"{STEP}-{step}", f"Step {step}/{total}: {shown}", data=dict(row))
        began, first = self._began
        if step > first and total:
            finish = int(now + (now - began) / (step - first) * (total - step))
            self._put(self._job(), estimated_finish=finish)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Note an evaluation after the step of `row`."""
        step = int(row["step"])
        shown = ", ".join(f"{name.replace('_', ' ')}={value:.4g}" for name, value in _numbers(row).items())
        message = f"Evaluation after step {step}: {shown}"
        self._rows.tell(self._job_id, f"{EVALUATION}-{step}", message, data=dict(row))

    def saved(self, kept: list[SavedVersion]) -> None:
        """Note the checkpoints that are on disk, the newest last."""
        with self._rows.changing():
            names = {self._checkpoint_id(saved.step) for saved in kept}
            for checkpoint in self._rows.checkpoints.all((self._job_id,)):
                if checkpoint.id not in names:
                    self._rows.checkpoints.delete(checkpoint.id)
            if self._job().status == "cancelled":
                return
            for saved in kept:
                metrics = self._metrics(saved.step)
                checkpoint = JobCheckpoint(
                    id=self._checkpoint_id(saved.step),
                    created_at=int(self._rows.clock()),
                    fine_tuned_model_checkpoint=f"{self._name}@{saved.alias}",
                    fine_tuning_job_id=self._job_id,
                    step_number=saved.step,
                    metrics=CheckpointMetrics.model_validate({"step": saved.step, **metrics}),
                )
                self._rows.checkpoints.add(checkpoint, owner="", group=self._job_id)
            if kept:
                step = kept[-1].step
                self._rows.tell(self._job_id, f"saved-{step}", f"Checkpoint created at step {step}")

    def _checkpoint_id(self, step: int) -> str:
        return f"ftckpt-{self._job_id.partition('-')[2]}-{step}"

    def _metrics(self, step: int) -> dict[str, float]:
        """Return what events tell of a step, which an earlier process may have finished."""
        rows = [self._rows.data(self._job_id, f"{kind}-{step}") for kind in (STEP, EVALUATION)]
        return {name: value for row in rows for name, value in _numbers(row).items()}

    def _job(self) -> FineTuningJob:
        return self._rows.jobs.get(self._job_id)

    def _put(self, job: FineTuningJob, **fields: Any) -> None:
        if job.status == "running":
            self._rows.put(job, "running", **fields)


def _event_id(job_id: str, key: str) -> str:
    return f"ftevent-{job_id.partition('-')[2]}-{key}"


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}
