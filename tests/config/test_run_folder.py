"""The folder of a run: the link to the newest one, and what a start that failed leaves."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallm.config.run_folder import check_writable, export_folder, link_latest, remove_unused, run_folder
from parallm.errors import RunFolderError

ROOT = Path(__file__).parents[2]
RUNS = Path("checkpoints")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(*names: str) -> list[Path]:
    folders = [RUNS / name for name in names]
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def test_latest_names_the_run_that_began_last() -> None:
    for folder in make("a/2025-01-01", "a/2025-01-02"):
        link_latest(folder.absolute())
        assert (RUNS / "a" / "latest").readlink() == Path(folder.name)
    assert [path.name for path in sorted((RUNS / "a").iterdir())] == ["2025-01-01", "2025-01-02", "latest"]


def test_latest_names_the_job_of_a_sweep_that_began_last() -> None:
    (job,) = make("a/sweep_2025-01-01/3")
    link_latest(job)
    assert (RUNS / "a" / "latest").readlink() == Path("sweep_2025-01-01/3")
    assert (RUNS / "a" / "latest").is_dir()


def test_a_run_that_goes_on_is_the_latest_again_and_is_found_by_its_own_name() -> None:
    first, second = make("a/2025-01-01", "a/2025-01-02")
    (first / "step_000010").mkdir()
    link_latest(second)
    link_latest(first)
    assert run_folder("a", "auto", "2025-01-03") == "checkpoints/a/2025-01-01"


def test_a_run_elsewhere_has_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine" / "run").mkdir(parents=True)
    link_latest(tmp_path / "mine" / "run")
    link_latest(make("alone")[0])
    assert not list(tmp_path.rglob("latest"))


def test_a_folder_called_latest_is_left_alone_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    kept, run = make("a/latest/mine", "a/2025-01-01")
    with caplog.at_level(logging.WARNING):
        link_latest(run)
    assert kept.is_dir()
    assert "does not name this run" in caplog.text
    assert sorted(path.name for path in (RUNS / "a").iterdir()) == ["2025-01-01", "latest"]


LINKING = """
import sys
from pathlib import Path
from parallm.config.run_folder import link_latest
for _ in range(300):
    link_latest(Path(sys.argv[1]))
"""


def test_processes_that_begin_at_the_same_time_never_leave_the_name_without_a_run() -> None:
    folders = make("a/2025-01-01", "a/2025-01-02", "a/2025-01-03")
    link_latest(folders[0])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = [subprocess.Popen([sys.executable, "-c", LINKING, str(folder)], env=environment) for folder in folders]
    seen = set()
    while any(process.poll() is None for process in processes):
        seen.add((RUNS / "a" / "latest").readlink().name)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert seen <= {folder.name for folder in folders}
    assert len(list((RUNS / "a").iterdir())) == 4


def test_a_start_that_failed_leaves_nothing() -> None:
    (folder,) = make("a/2025-01-01")
    (folder / "run.log").touch()
    (folder / "config.yaml").touch()
    (folder / "poet").mkdir()
    remove_unused(folder.absolute())
    assert not RUNS.exists()


@pytest.mark.parametrize(
    "left",
    ["metrics.jsonl", "poet/metrics.jsonl", "trajectories.jsonl", "serving-b5/serving.json", "process.lock"],
)
def test_a_run_that_has_left_something_stays(left: str) -> None:
    (folder,) = make("a/2025-01-01")
    (folder / left).parent.mkdir(exist_ok=True)
    (folder / left).touch()
    remove_unused(folder.absolute())
    assert (folder / left).exists()


def test_a_folder_that_the_user_named_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    remove_unused(tmp_path / "mine")
    remove_unused(tmp_path)
    assert (tmp_path / "mine").is_dir()


def test_other_runs_of_the_name_stay_and_the_newest_is_the_latest_again() -> None:
    older, kept, failed = make("a/2025-01-01", "a/2025-01-02", "a/2025-01-03")
    link_latest(failed)
    remove_unused(failed.absolute())
    assert older.is_dir()
    assert (RUNS / "a" / "latest").resolve() == kept.resolve()


def test_what_operators_have_set_is_no_run() -> None:
    failed, run, serving = make("a/2025-01-01", "a/2025-01-02", "a/serving-b5")
    (serving / "serving.json").touch()
    link_latest(failed)
    remove_unused(failed.absolute())
    assert (RUNS / "a" / "latest").resolve() == run.resolve()
    assert run_folder("a", "auto", "2025-01-03") == "checkpoints/a/2025-01-03"
    remove_unused(run.absolute())
    assert not (RUNS / "a" / "latest").is_symlink()
    assert (serving / "serving.json").exists()


def test_the_only_run_takes_the_link_with_it() -> None:
    (failed,) = make("a/2025-01-01")
    (failed / "summary.json").touch()
    link_latest(failed)
    remove_unused(failed.absolute())
    assert not RUNS.exists()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    RUNS.write_text("")
    with pytest.raises(RunFolderError, match="checkpoints is a file; make room for it, start in another folder"):
        check_writable(RUNS / "a" / "2025-01-01")


def test_an_export_has_a_folder_of_its_own_only_where_none_is_named() -> None:
    assert export_folder("export", None, "2025-01-01") == "checkpoints/export/2025-01-01"
    assert export_folder("export", "out", "2025-01-01") == "."
