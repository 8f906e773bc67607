"""Jobs in a folder of the test, with a clock that stands still, and an application of one line."""

import asyncio
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from parallm.jobs.batches import Answer, Batches
from parallm.jobs.files import FileStore
from parallm.jobs.records import Batch, FileObject
from parallm.jobs.settings import JobSettings
from parallm.jobs.store import JobStore
from parallm.server.jobs.schemas import BatchBody

COMPLETIONS = "/v1/completions"


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Files and batches of a folder; a second one of the same folder is what a new process has."""

    def __init__(self, folder: Path, clock: Clock, **settings: Any) -> None:
        self.folder = folder
        self.clock = clock
        given = JobSettings(**{"batch_requests": 2} | settings)
        folder.mkdir(exist_ok=True)
        self.store = JobStore(folder / "jobs.sqlite")
        self.files = FileStore(self.store, folder / "files", given, clock=clock)
        self.batches = Batches(self.store, self.files, folder / "batches", given, clock=clock)
        self.files.is_needed = self.batches.reader_of
        self.files.clean(self.batches.pending_files())

    def upload(self, content: bytes, name: str = "in.jsonl", **fields: Any) -> FileObject:
        return self.files.add(io.BytesIO(content), **{"name": name, "purpose": "batch", "owner": "", **fields})

    def batch(self, names: Sequence[str], **fields: Any) -> Batch:
        file = self.upload(lines(names))
        body = BatchBody(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h", **fields)
        return self.batches.create(body, "", None)

    def text(self, file_id: str | None) -> list[dict[str, Any]]:
        assert file_id is not None
        rows = self.files.path(self.files.get(file_id)).read_text().splitlines()
        return [json.loads(row) for row in rows]

    async def until_over(self, name: str, ask: Callable[[str, Mapping[str, Any]], Any]) -> Batch:
        """Answer batches until this one is over."""
        running = asyncio.create_task(self.batches.run(ask))
        try:
            while (batch := self.batches.get(name, None)).status not in ("completed", "failed", "expired", "cancelled"):
                await asyncio.sleep(0)
                if running.done():
                    running.result()
            return batch
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def lines(names: Sequence[str], **fields: Any) -> bytes:
    rows = [
        {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": {"model": "base", "prompt": name}} | fields
        for name in names
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


class Application:
    """Answers a prompt by itself; `statuses` are those of the next answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.statuses: list[int] = []

    async def __call__(self, path: str, body: Mapping[str, Any]) -> Answer:
        assert path == COMPLETIONS
        self.asked.append(body["prompt"])
        await asyncio.sleep(0)
        status = self.statuses.pop(0) if self.statuses else 200
        usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
        choice = {"text": body["prompt"].upper(), "finish_reason": "stop"}
        return Answer(status, "request-1", {"choices": [choice], "usage": usage} if status == 200 else {"error": {}})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bench(tmp_path: Path, clock: Clock) -> Bench:
    return Bench(tmp_path / "jobs", clock)


@pytest.fixture
def application() -> Application:
    return Application()
