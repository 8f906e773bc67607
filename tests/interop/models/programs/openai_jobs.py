"""Hands work in through OpenAI's own client: a batch, a reinforcement job, and the batch again by its model.

    python tests/interop/models/programs/openai_jobs.py URL TRAIN.jsonl HELD_OUT.jsonl HYPERPARAMETERS

Files have lines of messages and reference_answer. Needs the client and nothing of ours. Prints one line of JSON.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import openai

CHAT = "/v1/chat/completions"
GRADER = {
    "type": "string_check",
    "name": "last line",
    "input": "{{sample.output_text}}",
    "operation": "like",
    "reference": "#### {{item.reference_answer}}",
}
SECONDS = 1500.0


def main(url: str, train: Path, held_out: Path, hyperparameters: Any) -> None:
    problems = [json.loads(line) for line in held_out.read_text().splitlines()]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        before = accuracy(client, "base", problems)
        training, validation = (client.files.create(file=file, purpose="fine-tune") for file in (train, held_out))
        method: Any = {
            "type": "reinforcement",
            "reinforcement": {"grader": GRADER, "hyperparameters": hyperparameters},
        }
        job = client.fine_tuning.jobs.create(
            model="base",
            training_file=training.id,
            validation_file=validation.id,
            method=method,
            suffix="sums",
            seed=1,
        )
        while job.status not in ("succeeded", "failed", "cancelled"):
            time.sleep(0.2)
            job = client.fine_tuning.jobs.retrieve(job.id)
        if job.status != "succeeded":
            raise SystemExit(f"the job is {job.status}: {job.error}")
        events = list(client.fine_tuning.jobs.list_events(job.id, limit=10))
        steps = [event.data["step"] for event in events if event.message.startswith("Step ")]  # type: ignore[index]
        checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id, limit=1))
        found = {
            "version": openai.__version__,
            "before": before,
            "after": accuracy(client, str(job.fine_tuned_model), problems),
            "checkpoint": accuracy(client, checkpoints[0].fine_tuned_model_checkpoint, problems[:8]),
            "steps": steps[::-1],
            "model": job.fine_tuned_model,
            "results": len(client.files.content(job.result_files[0]).text.splitlines()),
            "jobs": [one.id for one in client.fine_tuning.jobs.list()] == [job.id],
        }
        print(json.dumps(found))


def accuracy(client: openai.OpenAI, model: str, problems: list[Any]) -> float:
    """The share of problems with a right last line, by a batch."""
    rows = [
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": CHAT,
            "body": {"model": model, "messages": problem["messages"], "max_completion_tokens": 64, "temperature": 0},
        }
        for number, problem in enumerate(problems)
    ]
    content = "\n".join(map(json.dumps, rows)).encode()
    file = client.files.create(file=("held_out.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    until = time.monotonic() + SECONDS
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        if time.monotonic() > until:
            raise SystemExit(f"the batch takes more than {SECONDS:.0f} s: {batch}")
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    answers = [json.loads(line) for line in client.files.content(str(batch.output_file_id)).text.splitlines()]
    if len({answer["custom_id"] for answer in answers}) != len(problems):
        raise SystemExit(f"{len(answers)} answers to {len(problems)} problems: {batch}")
    right = 0
    for answer in answers:
        text = answer["response"]["body"]["choices"][0]["message"]["content"]
        right += text.strip().splitlines()[-1:] == [f"#### {problems[int(answer['custom_id'])]['reference_answer']}"]
    return right / len(problems)


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
