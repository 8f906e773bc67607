"""Probes of `/v1/files` and `/v1/batches`; `openai_probes.py` runs them."""

import json
import time
from typing import Any

import openai
from openai_probes import ASK, MODEL, Client, bad, chat, expect, probe, refused

CHAT = "/v1/chat/completions"
SECONDS = 60.0


def upload(client: Client, rows: list[dict[str, Any]], purpose: Any = "batch") -> Any:
    content = "\n".join(map(json.dumps, rows)).encode()
    return client.files.create(file=("rows.jsonl", content), purpose=purpose)


def row(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": MODEL, **body}}


def ended(client: Client, batch: Any) -> Any:
    until = time.monotonic() + SECONDS
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        expect(time.monotonic() < until, batch)
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def answers(client: Client, file_id: str | None) -> dict[str, Any]:
    expect(file_id, "no file")
    rows = [json.loads(line) for line in client.files.content(str(file_id)).text.splitlines()]
    return {one["custom_id"]: one for one in rows}


@probe
def files_are_kept_listed_and_deleted(client: Client) -> None:
    content = json.dumps(row("a")).encode()
    file = client.files.create(
        file=("rows.jsonl", content),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    expect((file.bytes, file.filename, file.purpose) == (len(content), "rows.jsonl", "batch"), file)
    expect(file.expires_at == file.created_at + 3600, file)
    expect(client.files.wait_for_processing(file.id).status == "processed")
    expect(client.files.retrieve(file.id) == file)
    expect(client.files.content(file.id).read() == content)
    expect(file.id in [one.id for one in client.files.list(purpose="batch", limit=1)], "pages end too early")
    expect(client.files.delete(file.id).deleted)
    refused(openai.NotFoundError, "id", lambda: client.files.retrieve(file.id))
    bad("purpose", lambda: client.files.create(file=("a", b"a"), purpose="vision"))


@probe
def a_batch_has_the_answers_of_its_requests(client: Client) -> None:
    alone = chat(client)
    rows = [row(name, messages=ASK, max_completion_tokens=8, temperature=0) for name in ("a", "b")]
    file = upload(client, [*rows, row("c", messages=[])])
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"of": "a probe"}
    )
    batch = ended(client, batch)
    expect((batch.status, batch.model, batch.metadata) == ("completed", MODEL, {"of": "a probe"}), batch)
    expect(batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}, batch)
    right = answers(client, batch.output_file_id)
    expect(sorted(right) == ["a", "b"], right)
    text = right["a"]["response"]["body"]["choices"][0]["message"]["content"]
    expect(text == alone.choices[0].message.content, text)
    expect(batch.usage.total_tokens == 2 * alone.usage.total_tokens, batch.usage)
    wrong = answers(client, batch.error_file_id)
    expect(wrong["c"]["response"]["status_code"] == 400, wrong)
    expect(batch.id in [one.id for one in client.batches.list(limit=1)])


@probe
def batches_answer_every_endpoint_they_name(client: Client) -> None:
    asked = {
        "/v1/completions": {"prompt": "12 + 3 =", "max_tokens": 4},
        "/v1/responses": {"input": "12 + 3?", "max_output_tokens": 16},
        "/v1/embeddings": {"input": "12 + 3"},
    }
    for url, body in asked.items():
        file = upload(client, [row("a", url, **body)])
        made: Any = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
        (answer,) = answers(client, ended(client, made).output_file_id).values()
        expect(answer["response"]["status_code"] == 200, answer)
    bad(
        "endpoint", lambda: client.batches.create(input_file_id=file.id, endpoint="/v1/videos", completion_window="24h")
    )


@probe
def a_wrong_batch_fails_with_its_lines(client: Client) -> None:
    file = upload(client, [row("a", messages=ASK), row("a", messages=ASK)])
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"))
    expect((batch.status, batch.errors.data[0].line) == ("failed", 2), batch)
    bad("batch_id", lambda: client.batches.cancel(batch.id))
    refused(openai.NotFoundError, "id", lambda: client.batches.retrieve("batch_none"))


@probe
def a_cancelled_batch_ends(client: Client) -> None:
    rows = [row(f"{number}", messages=ASK, max_completion_tokens=64, ignore_eos=True) for number in range(500)]
    file = upload(client, rows)
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    expect(client.batches.cancel(batch.id).status == "cancelling")
    expect(ended(client, batch).status == "cancelled")
