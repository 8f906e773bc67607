"""Batches: every request is answered once, also after a restart, and wrong files are refused line by line."""

import asyncio
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from parallm.errors import InvalidRequest, UnknownObject
from parallm.jobs import batch_lines, batches, retries
from parallm.jobs.batch_lines import Progress, check_file
from parallm.jobs.batches import Answer
from parallm.jobs.records import Batch
from parallm.jobs.retries import Retries
from parallm.server.jobs.schemas import BatchBody
from tests.jobs.conftest import COMPLETIONS, Application, Bench, Clock, lines


def test_a_batch_is_answered_whole(bench: Bench, application: Application) -> None:
    application.statuses = [200, 400]
    made = bench.batch(["a", "b", "c"], metadata={"of": "me"})
    batch = asyncio.run(bench.until_over(made.id, application))
    assert (batch.status, batch.model, batch.metadata) == ("completed", "base", {"of": "me"})
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (4, 6, 10)
    answers = {row["custom_id"]: row for row in bench.text(batch.output_file_id)}
    assert {name: row["response"]["body"]["choices"][0]["text"] for name, row in answers.items()} == {
        "a": "A",
        "c": "C",
    }
    (failed,) = bench.text(batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"], failed["error"]) == ("b", 400, None)
    assert not (bench.folder / "batches" / batch.id).exists()


def test_a_batch_without_failures_has_no_error_file(bench: Bench, application: Application) -> None:
    batch = asyncio.run(bench.until_over(bench.batch(["a"]).id, application))
    assert (batch.status, batch.error_file_id) == ("completed", None)


def test_requests_that_should_come_later_come_again(
    bench: Bench, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_SECONDS", 0.01)
    application.statuses = [429, 503, 504]
    batch = asyncio.run(bench.until_over(bench.batch(["a"]).id, application))
    assert (application.asked, batch.request_counts.completed) == (["a"] * 4, 1)


def test_delays_double_up_to_ten_minutes_and_begin_anew_after_progress() -> None:
    now, delays = 0.0, []
    waits = Retries(lambda: now)
    for _ in range(12):
        waits.failed("a")
        delays.append(waits.seconds_until(["a"]))
        assert (waits.is_due("a"), waits.is_due("b")) == (False, True)
        now += delays[-1] or 0
        assert waits.is_due("a")
    assert delays == [2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600, 600]
    waits.failed("a", has_progressed=True)
    assert waits.seconds_until(["a"]) == 2
    waits.failed("a", within=1.5)
    assert waits.seconds_until(["a"]) == 1.5
    waits.forget("a")
    assert (waits.seconds_until(["a"]), waits.seconds_until([])) == (0, None)


def test_a_batch_that_has_to_wait_does_not_hold_up_others(bench: Bench, application: Application) -> None:
    """More batches than are at work at once have to wait, and one behind them is answered meanwhile."""

    async def overloaded_for_some(path: str, body: Mapping[str, Any]) -> Answer:
        if body["prompt"].startswith("slow"):
            return Answer(503, "request-1", {"error": {}})
        return await application(path, body)

    slow = [bench.batch([f"slow{place}" for place in range(20)]) for _ in range(2 * batches.MAX_AT_WORK)]
    last = bench.batch(["a", "b", "c"])

    async def run() -> None:
        assert (await bench.until_over(last.id, overloaded_for_some)).request_counts.completed == 3
        assert {bench.batches.get(batch.id, None).status for batch in slow} <= {"validating", "in_progress"}
        cancelled = bench.batches.cancel(slow[0].id, None)  # also one that waits, at once
        assert (await bench.until_over(cancelled.id, overloaded_for_some)).status == "cancelled"

    asyncio.run(run())


def test_batches_together_ask_for_no_more_than_the_limit(bench: Bench, application: Application) -> None:
    under_way, most = 0, 0

    async def counted(path: str, body: Mapping[str, Any]) -> Answer:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            await asyncio.sleep(0.001)
        finally:  # also for those that are cancelled
            under_way -= 1
        return await application(path, body)

    made = [bench.batch([f"{batch}-{place}" for place in range(5)]) for batch in range(3)]

    async def run() -> list[Batch]:
        return [await bench.until_over(batch.id, counted) for batch in made]

    assert [batch.request_counts.completed for batch in asyncio.run(run())] == [5, 5, 5]
    assert most == 2


def test_an_answer_that_was_cut_off_is_an_error(bench: Bench) -> None:
    async def cut_off(path: str, body: Mapping[str, Any]) -> Answer:
        return Answer(200, "request-1", {"choices": [{"text": "A", "finish_reason": "abort"}]})

    batch = asyncio.run(bench.until_over(bench.batch(["a"]).id, cut_off))
    (row,) = bench.text(batch.error_file_id)
    assert (batch.output_file_id, row["response"], row["error"]["code"]) == (None, None, "request_aborted")


ROW = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {}}


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (lines(["a"]) + b"{", "invalid_json_line", 2),
        (b"[" * 100_000, "invalid_json_line", 1),
        (b"\xff\xfe\n", "invalid_json_line", 1),
        (b"[]", "invalid_json_line", 1),
        (lines(["a", "a"]), "duplicate_custom_id", 2),
        (json.dumps({**ROW, "custom_id": 1}).encode(), "missing_required_parameter", 1),
        (json.dumps({**ROW, "custom_id": ""}).encode(), "missing_required_parameter", 1),
        (json.dumps({**ROW, "body": None}).encode(), "missing_required_parameter", 1),
        (json.dumps({**ROW, "method": "GET"}).encode(), "invalid_method", 1),
        (json.dumps({**ROW, "url": "/v1/files"}).encode(), "mismatched_url", 1),
        (json.dumps({**ROW, "body": {"stream": True}}).encode(), "invalid_request", 1),
        (json.dumps({**ROW, "priority": 1}).encode(), "unknown_parameter", 1),
        (json.dumps({**ROW, "body": {"model": "\ud800"}}).encode(), "invalid_json_line", 1),
        (json.dumps({**ROW, "\ud800": 1}).encode(), "invalid_json_line", 1),
        (b'{"a": "' + b"a" * (5 << 20) + b'"}\n' + lines(["b"]), "line_too_long", 1),
    ],
)
def test_a_wrong_file_fails_its_batch(
    bench: Bench, application: Application, content: bytes, code: str, line: int | None
) -> None:
    made = bench.batch(["a"])
    bench.files.path(bench.files.get(made.input_file_id)).write_bytes(content)
    batch = asyncio.run(bench.until_over(made.id, application))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, line)
    assert application.asked == []


def test_a_batch_that_cannot_be_answered_does_not_end_those_of_others(bench: Bench, application: Application) -> None:
    async def broken(path: str, body: Mapping[str, Any]) -> Answer:
        if body["prompt"] == "a":
            raise RecursionError
        return await application(path, body)

    first, second = bench.batch(["a"]), bench.batch(["b"])
    assert asyncio.run(bench.until_over(second.id, broken)).status == "completed"
    failed = bench.batches.get(first.id, None)
    assert (failed.status, failed.errors and "RecursionError" in failed.errors.data[0].message) == ("failed", True)


def test_more_requests_than_openai_takes_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallm.jobs.batch_lines.MAX_REQUESTS", 2)
    path = bench.files.path(bench.upload(lines(["a", "b", "c"])))
    assert [error.code for error in check_file(path, COMPLETIONS).errors] == ["too_many_requests"]


def test_a_cancelled_batch_keeps_its_answers(bench: Bench, application: Application) -> None:
    made = bench.batch([f"{number}" for number in range(100)])

    async def ask(path: str, body: Mapping[str, Any]) -> Answer:
        if len(application.asked) == 10:
            assert bench.batches.cancel(made.id, None).status == "cancelling"
        return await application(path, body)

    batch = asyncio.run(bench.until_over(made.id, ask))
    assert batch.status == "cancelled"
    assert 0 < batch.request_counts.completed == len(bench.text(batch.output_file_id)) < 100
    with pytest.raises(InvalidRequest, match="nothing to cancel"):
        bench.batches.cancel(made.id, None)


def test_a_batch_expires_with_its_answers(bench: Bench, application: Application, clock: Clock) -> None:
    made = bench.batch([f"{number}" for number in range(20)])

    async def ask(path: str, body: Mapping[str, Any]) -> Answer:
        if len(application.asked) == 10:
            clock.now += 24 * 3600
            bench.batches._changed.set()  # a real clock wakes it by itself
            await asyncio.sleep(3600)
        return await application(path, body)

    batch = asyncio.run(bench.until_over(made.id, ask))
    assert (batch.status, batch.expired_at) == ("expired", int(clock.now))
    errors = bench.text(batch.error_file_id)
    assert {row["error"]["code"] for row in errors} == {"batch_expired"}
    names = [row["custom_id"] for row in [*errors, *bench.text(batch.output_file_id)]]
    assert sorted(names, key=int) == [f"{number}" for number in range(20)]


def answered_after_restarts(bench: Bench, application: Application) -> list[str]:
    """Stop a batch of 30 requests after each 7 answers, tear its last line, and go on with a new process each time."""
    made = bench.batch([f"{number}" for number in range(30)])

    async def some() -> None:
        running = asyncio.create_task(bench.batches.run(application))
        target = len(application.asked) + 7
        while len(application.asked) < target and bench.batches.get(made.id, None).status != "completed":
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    for _ in range(3):
        asyncio.run(some())
        with (bench.folder / "batches" / made.id / "output.jsonl").open("ab") as file:
            file.write(b'{"id": "batch_req_half')
        bench.store.close()
        bench = Bench(bench.folder, bench.clock)
    batch = asyncio.run(bench.until_over(made.id, application))
    return [row["custom_id"] for row in bench.text(batch.output_file_id)]


def test_a_restart_answers_nothing_twice_and_forgets_nothing(bench: Bench, application: Application) -> None:
    names = answered_after_restarts(bench, application)
    assert sorted(names, key=int) == [f"{number}" for number in range(30)]
    assert len(application.asked) < 30 + 3 * 3  # at most what was under way is asked again


def test_without_reading_what_is_done_answers_come_twice(
    bench: Bench, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    read = batch_lines.read_progress

    def forget(*files: Any) -> Progress:
        read(*files)
        return Progress()

    monkeypatch.setattr(batches, "read_progress", forget)
    assert len(answered_after_restarts(bench, application)) > 30


def test_a_process_that_dies_while_it_hands_files_over_hands_over_the_same(
    bench: Bench, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    application.statuses = [400]
    made = bench.batch(["a", "b"])
    adopt, calls = bench.files.adopt, list[str]()

    def die(*arguments: Any, **fields: Any) -> None:
        calls.append(arguments[1])
        adopt(*arguments, **fields)
        raise SystemError  # nothing behind it runs

    monkeypatch.setattr(bench.files, "adopt", die)
    with pytest.raises(SystemError):
        asyncio.run(bench.until_over(made.id, application))
    bench.store.close()
    again = Bench(bench.folder, bench.clock)
    batch = asyncio.run(again.until_over(made.id, application))
    assert (batch.status, batch.output_file_id) == ("completed", calls[0])
    assert [len(again.text(name)) for name in (batch.output_file_id, batch.error_file_id)] == [1, 1]
    assert len(application.asked) == 2


def test_what_no_batch_can_be_made_of_is_refused(bench: Bench) -> None:
    file = bench.upload(lines(["a"]), purpose="fine-tune")
    with pytest.raises(InvalidRequest, match="purpose=batch"):
        bench.batches.create(_body(file.id, COMPLETIONS), "", None)
    with pytest.raises(InvalidRequest, match="/v1/embeddings"):
        bench.batches.create(_body(file.id, "/v1/images/generations"), "", None)
    with pytest.raises(UnknownObject):
        bench.batches.create(_body("file-none", COMPLETIONS), "", None)


def _body(file_id: str, endpoint: str) -> BatchBody:
    return BatchBody(input_file_id=file_id, endpoint=endpoint, completion_window="24h")


def test_a_batch_that_is_cancelled_as_it_ends_says_so(
    bench: Bench, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, read, acted = bench.batch(["a", "b"]), batch_lines.read_progress, threading.Event()

    async def run() -> Batch:
        loop = asyncio.get_running_loop()

        def read_late(*files: Path) -> Progress:
            progress = read(*files)
            if progress.done and not acted.is_set():
                loop.call_soon_threadsafe(bench.batches.cancel, made.id, None)
                loop.call_soon_threadsafe(acted.set)
                assert acted.wait(10)
            return progress

        monkeypatch.setattr(batches, "read_progress", read_late)
        return await bench.until_over(made.id, application)

    batch = asyncio.run(run())
    assert (batch.status, batch.request_counts.completed) == ("cancelled", 2)
    assert batch.cancelling_at is not None
    assert len(bench.text(batch.output_file_id)) == 2
