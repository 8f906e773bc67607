"""Probes of `/v1/fine_tuning/jobs`; `openai_probes.py` runs them."""

import time
from typing import Any

import openai
from openai_probes import ASK, Client, bad, expect, probe, refused
from openai_probes_batches import upload

SECONDS = 120.0
SUMS = [(a, b) for a in range(1, 5) for b in range(1, 5)]
DEMONSTRATIONS = [
    {"messages": [{"role": "user", "content": f"{a} + {b}?"}, {"role": "assistant", "content": f"#### {a + b}"}]}
    for a, b in SUMS
]
STRINGS: Any = {
    "type": "string_check",
    "name": "sum",
    "input": "{{sample.output_text}}",
    "operation": "like",
    "reference": "#### {{item.reference_answer}}",
}


def create(client: Client, **fields: Any) -> Any:
    return client.fine_tuning.jobs.create(**{"model": "base", "seed": 1, **fields})


def ended(client: Client, job: Any) -> Any:
    until = time.monotonic() + SECONDS
    while job.status not in ("succeeded", "failed", "cancelled"):
        expect(time.monotonic() < until, job)
        time.sleep(0.1)
        job = client.fine_tuning.jobs.retrieve(job.id)
    return job


@probe
def a_supervised_job_makes_a_model(client: Client) -> None:
    file = upload(client, DEMONSTRATIONS, "fine-tune")
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1, "batch_size": 4}}}
    job = create(client, training_file=file.id, validation_file=file.id, suffix="sums", method=method)
    expect((job.object, job.status, job.fine_tuned_model) == ("fine_tuning.job", "validating_files", None), job)
    job = ended(client, job)
    expect(job.status == "succeeded" and job.fine_tuned_model.startswith("ft:model:sums:"), job)
    expect((job.hyperparameters.n_epochs, job.hyperparameters.learning_rate_multiplier) == (1, 1.0), job)
    expect(job.trained_tokens > 0 and job.finished_at >= job.created_at, job)
    expect(client.files.content(job.result_files[0]).text.startswith("step,train_loss"))
    for name in (job.fine_tuned_model, f"{job.fine_tuned_model}@ckpt-step-4"):
        answer = client.chat.completions.create(model=name, messages=ASK, max_completion_tokens=8, temperature=0)
        expect(answer.model.startswith(job.fine_tuned_model), answer.model)
    expect(job.fine_tuned_model in [model.id for model in client.models.list()])
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=2))  # all pages
    expect(len({event.id for event in events}) == len(events) >= 8, events)
    expect(events[0].message == "The job has successfully completed", events[0])
    (checkpoint,) = client.fine_tuning.jobs.checkpoints.list(job.id)
    expect((checkpoint.step_number, checkpoint.metrics.step) == (4, 4), checkpoint)
    expect(checkpoint.metrics.valid_loss > 0, checkpoint)
    expect(client.models.delete(job.fine_tuned_model).deleted)
    refused(openai.NotFoundError, "model", lambda: client.models.retrieve(job.fine_tuned_model))


@probe
def jobs_wait_pause_resume_and_are_cancelled(client: Client) -> None:
    rows = [
        {"messages": one["messages"][:1], "reference_answer": a + b}
        for one, (a, b) in zip(DEMONSTRATIONS, SUMS, strict=True)
    ]
    file = upload(client, rows, "fine-tune")
    hyperparameters = {"n_epochs": 500, "batch_size": 1, "compute_multiplier": 0.25}
    method: Any = {"type": "reinforcement", "reinforcement": {"grader": STRINGS, "hyperparameters": hyperparameters}}
    job = create(client, training_file=file.id, method=method, metadata={"of": "a probe"})
    expect((job.metadata, job.method.reinforcement.grader.type) == ({"of": "a probe"}, "string_check"), job)
    expect(client.fine_tuning.jobs.pause(job.id).status == "paused")
    refused(openai.ConflictError, None, lambda: client.files.delete(file.id))
    expect(client.fine_tuning.jobs.resume(job.id).status == "validating_files")
    expect(job.id in [one.id for one in client.fine_tuning.jobs.list(limit=1)])
    expect(client.fine_tuning.jobs.cancel(job.id).status == "cancelled")
    bad("fine_tuning_job_id", lambda: client.fine_tuning.jobs.cancel(job.id))
    refused(openai.NotFoundError, "id", lambda: client.fine_tuning.jobs.retrieve("ftjob-none"))


@probe
def wrong_jobs_are_refused_by_name(client: Client) -> None:
    file = upload(client, DEMONSTRATIONS, "fine-tune")
    for field, value in (
        ("method", {"type": "dpo", "dpo": {}}),
        ("method", {"type": "reinforcement", "reinforcement": {"grader": {"type": "python", "source": "1"}}}),
        ("hyperparameters", {"n_epochs": 0}),
        ("integrations", [{"type": "wandb", "wandb": {"project": "p"}}]),
        ("suffix", "a b"),
    ):
        bad(field, lambda field=field, value=value: create(client, training_file=file.id, **{field: value}))
    refused(openai.NotFoundError, "model", lambda: create(client, training_file=file.id, model="nope"))
    refused(openai.NotFoundError, "id", lambda: create(client, training_file="file-none"))
    wrong = ended(client, create(client, training_file=upload(client, [{"messages": ASK}], "fine-tune").id))
    expect((wrong.status, wrong.error.param) == ("failed", "training_file"), wrong)
