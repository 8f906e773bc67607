"""Files of clients: caps, names, owners, expiry, and what a killed process leaves."""

from pathlib import Path
from typing import Any

import pytest

from parallm.errors import FileTooLarge, FolderInUse, InvalidRequest, NotStored, Unavailable, UnknownObject
from parallm.jobs.files import BATCH_SECONDS
from parallm.jobs.jobs import open_jobs
from parallm.jobs.settings import JobSettings
from tests.jobs.conftest import Bench, Clock


def test_a_name_is_stored_and_never_a_path(bench: Bench) -> None:
    file = bench.upload(b"text", "../../etc/passwd")
    assert file.filename == "../../etc/passwd"
    assert [path.name for path in (bench.folder / "files").iterdir()] == [file.id]
    assert bench.files.path(file).read_bytes() == b"text"


@pytest.mark.parametrize("name", ["", "a" * 256, "a\nb", "a\0b"])
def test_names_that_do_not_print_are_refused(bench: Bench, name: str) -> None:
    with pytest.raises(InvalidRequest, match="characters"):
        bench.upload(b"text", name)


@pytest.mark.parametrize("name", ["../jobs.sqlite", "file-../../x", "", "%", "' OR '1'='1"])
def test_an_id_that_is_none_finds_nothing(bench: Bench, name: str) -> None:
    bench.upload(b"text")
    with pytest.raises(UnknownObject):
        bench.files.get(name)


@pytest.mark.parametrize(
    ("caps", "message"),
    [({"max_file_bytes": 1024}, "jobs.max_file_bytes"), ({"max_stored_bytes": 2000}, "jobs.max_stored_bytes")],
)
def test_files_beyond_a_cap_leave_nothing(tmp_path: Path, clock: Clock, caps: dict[str, Any], message: str) -> None:
    bench = Bench(tmp_path / "jobs", clock, **caps)
    kept = bench.upload(b"a" * 1000)
    with pytest.raises(FileTooLarge, match=message):
        bench.upload(b"a" * 1025)
    assert [path.name for path in (bench.folder / "files").iterdir()] == [kept.id]


def test_files_expire(bench: Bench, clock: Clock) -> None:
    usual, short = bench.upload(b"a"), bench.upload(b"b", expires_after=3600)
    kept = bench.upload(b"c", purpose="fine-tune")
    assert (usual.expires_at, kept.expires_at) == (clock.now + BATCH_SECONDS, None)
    clock.now += 3600
    with pytest.raises(UnknownObject):
        bench.files.get(short.id)
    assert not bench.files.path(short).exists()
    clock.now += BATCH_SECONDS
    page = bench.files.page(owner=None, purpose=None, after=None, limit=10, newest_first=True)
    assert [file.id for file in page.records] == [kept.id]


@pytest.mark.parametrize("seconds", [3599, 30 * 24 * 3600 + 1])
def test_times_that_openai_refuses_are_refused(bench: Bench, seconds: int) -> None:
    with pytest.raises(InvalidRequest, match=str(seconds)):
        bench.upload(b"a", expires_after=seconds)


def test_another_owner_sees_nothing(bench: Bench) -> None:
    mine, other = bench.upload(b"a", owner="ann"), bench.upload(b"b", owner="bob")
    page = bench.files.page(owner="ann", purpose=None, after=None, limit=10, newest_first=True)
    assert [file.id for file in page.records] == [mine.id]
    with pytest.raises(UnknownObject):
        bench.files.get(other.id, "ann")
    with pytest.raises(UnknownObject):
        bench.files.delete(other.id, "ann")


def test_pages_follow_each_other(bench: Bench) -> None:
    ids = [bench.upload(b"a").id for _ in range(5)]
    first = bench.files.page(owner=None, purpose="batch", after=None, limit=2, newest_first=True)
    rest = bench.files.page(owner=None, purpose="batch", after=first.records[-1].id, limit=9, newest_first=True)
    assert [file.id for file in [*first.records, *rest.records]] == ids[::-1]
    assert (first.has_more, rest.has_more) == (True, False)


def test_a_file_that_a_batch_reads_stays(bench: Bench, clock: Clock) -> None:
    batch = bench.batch(["a"])
    with pytest.raises(Unavailable, match=batch.id):
        bench.files.delete(batch.input_file_id, None)
    clock.now += BATCH_SECONDS
    assert bench.files.get(batch.input_file_id).id == batch.input_file_id
    bench.batches._fail(batch, "over")
    bench.files.remove_expired()
    with pytest.raises(UnknownObject):
        bench.files.get(batch.input_file_id)


def test_a_new_process_drops_half_written_files_and_keeps_the_others(bench: Bench, clock: Clock) -> None:
    kept = bench.upload(b"kept")
    (bench.folder / "files" / "file-half").write_bytes(b"ha")
    bench.store.close()
    again = Bench(bench.folder, clock)
    assert [path.name for path in (bench.folder / "files").iterdir()] == [kept.id]
    assert again.files.get(kept.id) == kept


def test_one_process_at_a_time_has_the_folder(tmp_path: Path) -> None:
    settings, folder = JobSettings(enabled=True), tmp_path / "jobs"
    with open_jobs(settings, folder, base="nano"), pytest.raises(FolderInUse), open_jobs(settings, folder, base="nano"):
        pass


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jobs.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(NotStored, match="name another"), open_jobs(JobSettings(enabled=True), tmp_path, base="nano"):
        pass
