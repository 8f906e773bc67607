"""Runs on the disk: whatever their files hold, reading them ends, stays inside and fits in memory."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallm.errors import RunUnreadable, UnknownObject
from parallm.metrics import run_files
from parallm.metrics.history import MAX_COLUMNS
from parallm.metrics.run_files import RunFolder
from parallm.metrics.run_folders import MAX_FIGURES, RunFolders

TIME = "2026-01-31_22-04-10"
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoints"
    root.mkdir()
    return root


def make_run(root: Path, name: str = "sums", time_: str = TIME, steps: int = 3, **files: str) -> Path:
    folder = root / name / time_
    folder.mkdir(parents=True)
    rows = "".join(json.dumps({"step": step, "reward/mean": step / 4}) + "\n" for step in range(1, steps + 1))
    written = {"metrics_jsonl": rows, "config_yaml": "name: sums\ntrainer:\n  steps: 3\n", **files}
    for file, text in written.items():
        (folder / file.replace("_jsonl", ".jsonl").replace("_yaml", ".yaml").replace("_json", ".json")).write_text(text)
    return folder


def only(root: Path) -> RunFolder:
    (folder,) = RunFolders([root]).folders().values()
    return folder


def test_runs_are_listed_the_newest_first_with_what_they_reached(root: Path) -> None:
    figures = {"figures": {"sums.accuracy_best": 0.6, "sums.none": None, "sums.text": "a"}}
    make_run(root, summary_json=json.dumps(figures))
    make_run(root, "words", "2026-02-01_08-00-00-123456", steps=2)
    runs = RunFolders([root])
    assert list(runs.folders()) == ["words~2026-02-01_08-00-00-123456", f"sums~{TIME}"]
    rows = [runs.row(run, folder) for run, folder in runs.folders().items()]
    assert [(row["name"], row["state"], row["step"], row["total_steps"]) for row in rows] == [
        ("words", "unknown", 2, 3),
        ("sums", "finished", 3, 3),
    ]
    assert rows[1]["figures"] == {"accuracy_best": 0.6}
    assert rows[1]["began"] == time.mktime(time.strptime(TIME, "%Y-%m-%d_%H-%M-%S"))
    assert rows[1]["ended"] == pytest.approx(time.time(), abs=60)
    assert rows[0]["ended"] is None


def test_a_run_of_a_living_process_is_running_and_one_of_a_dead_process_is_not(root: Path) -> None:
    folder = make_run(root)
    (folder / "process.lock").write_text(str(os.getpid()))
    assert RunFolders([root]).row("a", only(root))["state"] == "running"
    for text in ("999999999", "0", "1", "-5", "99999999999999999999", "word", ""):
        (folder / "process.lock").write_text(text)
        assert RunFolders([root]).row("a", only(root))["state"] == "unknown", text


def test_a_folder_may_be_all_runs_those_of_a_name_or_one(root: Path) -> None:
    folder = make_run(root)
    for given in (root, root / "sums", folder):
        assert list(RunFolders([given]).folders()) == [f"sums~{TIME}"]
    other = make_run(root.parent / "elsewhere")
    runs = RunFolders([root, root.parent / "elsewhere"])
    assert sorted(runs.folders()) == [f"sums~{TIME}", f"sums~{TIME}~2"]
    assert {found.path for found in runs.folders().values()} == {folder, other}


def test_the_run_of_the_process_is_there_wherever_it_is(root: Path) -> None:
    folder = make_run(root.parent / "elsewhere")
    assert [found.path for found in RunFolders([root], current=folder).folders().values()] == [folder]


def test_policies_are_the_folders_with_steps(root: Path) -> None:
    folder = make_run(root)
    (folder / "metrics.jsonl").unlink()
    for policy in ("poet", "clerk"):
        (folder / policy).mkdir()
        (folder / policy / "metrics.jsonl").write_text('{"step": 1, "a": 1}\n')
    (folder / "adapter").mkdir()
    runs, run = RunFolders([root]), f"sums~{TIME}"
    assert runs.row(run, runs.folders()[run])["policies"] == ["clerk", "poet"]
    assert runs.folder(run).name == f"sums/{TIME}/clerk"
    assert runs.folder(run, "poet").name == f"sums/{TIME}/poet"
    with pytest.raises(UnknownObject, match="has no policy 'adapter'; it has clerk, poet"):
        runs.folder(run, "adapter")


@pytest.mark.parametrize(
    "run",
    ["..", "../..", "sums", "/etc", f"sums/{TIME}", f"../checkpoints/sums/{TIME}", "", "\x00", "\ud800", "a" * 9999],
)
def test_no_name_leads_outside(root: Path, run: str) -> None:
    make_run(root)
    with pytest.raises(UnknownObject, match="no run"):
        RunFolders([root]).folder(run)
    with pytest.raises(UnknownObject):
        RunFolders([root]).folder(f"sums~{TIME}", run)


def test_links_out_of_the_folder_are_not_followed(root: Path) -> None:
    outside = make_run(root.parent / "outside", "secret")
    folder = make_run(root)
    (root / "linked").symlink_to(root.parent / "outside" / "secret")
    (root / "sums" / "latest").symlink_to(outside)
    assert list(RunFolders([root]).folders()) == [f"sums~{TIME}"]
    for name in ("metrics.jsonl", "config.yaml"):
        (folder / name).unlink()
        (folder / name).symlink_to(outside / name)
    found = RunFolder(root, ("sums", TIME))
    assert len(run_files.history_of(found)) == 0
    assert run_files.config_of(found) == {}
    (folder / "faults").symlink_to(outside)
    assert run_files.fault_steps(found) == {}


def test_a_folder_that_becomes_a_link_between_listing_and_reading_is_not_followed(root: Path) -> None:
    outside = make_run(root.parent / "outside", "secret")
    folder = make_run(root)
    runs = RunFolders([root])
    found = runs.folder(f"sums~{TIME}")
    folder.rename(root / "moved")
    folder.symlink_to(outside)
    assert len(runs.history(found)) == 0
    assert run_files.small_file(found, "config.yaml") == b""


def test_nothing_waits_for_what_is_no_plain_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(root)
    monkeypatch.chdir(folder)  # the path of a socket is short
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    os.mkfifo(folder / "summary.json")
    (folder / "happenings.jsonl").mkdir()
    began = time.monotonic()
    found = only(root)
    assert len(run_files.history_of(found)) == 0
    assert RunFolders([root]).row("a", found)["figures"] == {}
    assert run_files.newest_rows(found, "happenings.jsonl", 5) == []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("run.log")
        assert run_files.log_lines(found) == []
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "line",
    [
        DEEP,
        '{"step": ' + "9" * 5000 + "}",
        '{"step": 1e999, "a": 1}',
        '{"step": 99999999999999999999999, "a": 1}',
        '{"step": -5}',
        '{"step": true}',
        '{"step": "4"}',
        "[]",
        "null",
        '"' + "x" * 3_000_000 + '"',
        '{"step": 4, "a": ' + "1" * 4000 + "}",
        '{"step": 4, "a": 1e400, "b": NaN, "c": {"d": 1}, "e": [1], "f": "1"}',
        '{"step": 4, "\\ud800": 1}',
        "\x00" * 5000,
        '{"step": 4, "a"',
    ],
)
def test_lines_that_cannot_be_read_are_left_out(root: Path, line: str) -> None:
    make_run(root, metrics_jsonl=f'{{"step": 1, "a": 1}}\n{line}\n{{"step": 5, "a": 5}}\n')
    history = run_files.history_of(only(root))
    steps = history.view().steps.tolist()
    assert steps in ([1, 5], [1, 4, 5])
    assert history.view().rows(0, 9, ["a"], 9).columns["a"][[0, -1]].tolist() == [1, 5]


def test_steps_that_go_back_and_forth_cost_no_more_than_others(root: Path) -> None:
    rows = [{"step": step, "a": 1} for step in range(1, 20_001)]
    rows += [{"step": 20_000 - number % 2, "a": 2} for number in range(20_000)]
    make_run(root, metrics_jsonl="".join(json.dumps(row) + "\n" for row in rows))
    began = time.thread_time()
    history = run_files.history_of(only(root))
    assert (len(history), history.view().columns["a"][19_999]) == (20_000, 1)
    assert time.thread_time() - began < 10


def test_ever_new_names_fill_no_memory(root: Path) -> None:
    lines = [json.dumps({"step": step, **{f"{step}/{name}": 1 for name in range(200)}}) for step in range(1, 101)]
    make_run(root, metrics_jsonl="\n".join(lines))
    assert len(run_files.history_of(only(root)).view().names) == MAX_COLUMNS


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("MAX_FILE_BYTES", 50, "has .* bytes, the limit is 50"),
        ("MAX_SECONDS", -1.0, "takes more than -1 s to read, the limit"),
    ],
)
def test_a_limit_that_stops_a_read_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: float, text: str
) -> None:
    make_run(root)
    monkeypatch.setattr(run_files, name, value)
    with pytest.raises(RunUnreadable, match=rf"metrics.jsonl of sums/{TIME} {text}"):
        run_files.history_of(only(root))


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + depth)}: &{chr(98 + depth)} [{','.join([f'*{chr(97 + depth)}'] * 9)}]\n" for depth in range(12)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{chr(98 + depth)}: &{chr(98 + depth)}\n  <<: [{','.join([f'*{chr(97 + depth)}'] * 9)}]\n" for depth in range(12)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LAUGHS, "has aliases"),
        (MERGES, "has aliases"),
        ("a: !!python/object/apply:os.system [echo]", "cannot be read"),
        ("{" * 5000, "cannot be read"),
        ("a: [", "cannot be read"),
        ("a: \x00", "cannot be read"),
        ("\n".join(f"k{number}: 1" for number in range(6000)), "more than 5000 values, the limit"),
        (
            "".join("  " * depth + f"k{depth}:\n" for depth in range(40)) + "  " * 40 + "x: 1",
            "more than 32 deep, the limit",
        ),
        ("a: " + "x" * (1 << 20), "larger than 1048576 bytes, the limit"),
    ],
)
def test_a_hostile_configuration_is_refused_with_the_reason_and_the_run_still_listed(
    root: Path, text: str, reason: str
) -> None:
    make_run(root, config_yaml=text)
    runs = RunFolders([root])
    began = time.thread_time()
    with pytest.raises(RunUnreadable, match=reason):
        runs.config(only(root))
    assert runs.row("a", only(root))["total_steps"] is None
    assert time.thread_time() - began < 20


def test_a_configuration_is_flat_with_short_lists(root: Path) -> None:
    make_run(root, config_yaml="a:\n  b: [1, x]\n  c: {}\n  d: null\n  e: 2026-01-31\nf: true\n")
    assert run_files.config_of(only(root)) == {
        "a.b": [1, "x"],
        "a.c": "{}",
        "a.d": None,
        "a.e": '"2026-01-31"',
        "f": True,
    }


def test_figures_are_numbers_and_few(root: Path) -> None:
    figures: dict[str, Any] = {f"run.{number}": 1 for number in range(1000)}
    make_run(root, summary_json=json.dumps({"figures": figures}))
    assert len(RunFolders([root]).row("a", only(root))["figures"]) == MAX_FIGURES
    for text in (DEEP, '{"figures": [1]}', "null", '{"figures": {"a": {"b": 1}, "c": true, "d": [1]}}'):
        (root / "sums" / TIME / "summary.json").write_text(text)
        assert RunFolders([root]).row("a", only(root))["figures"] == {}, text[:40]


def test_a_log_is_read_from_its_end_with_records_of_several_lines(root: Path) -> None:
    filler = "2026-01-31 22:04:10,289 INFO parallm.run: filler\n" * 30_000
    failure = "2026-01-31 22:04:12,500 ERROR parallm.trainer: failed\nTraceback\n  File\n"
    text = f"{filler}2026-01-31 22:04:11,5 not a record\n{failure}"
    make_run(root)
    (root / "sums" / TIME / "run.log").write_text(text)
    lines = run_files.log_lines(only(root))
    assert len(lines) < 30_000
    assert (lines[-1].level, lines[-1].logger, lines[-1].text) == (
        "ERROR",
        "parallm.trainer",
        "failed\nTraceback\n  File",
    )
    as_json = {"time": "2026-01-31T22:04:10.500+00:00", "level": "info", "logger": "parallm", "message": "a\nb"}
    for other in (as_json, {"time": 5}, {"time": "x"}, {}):
        (root / "sums" / TIME / "run.log").write_text(json.dumps(other) + "\n")
        found = run_files.log_lines(only(root))
        assert [line.text for line in found] == (["a\nb"] if other is as_json else [""] if other == {} else [])


def test_checkpoints_and_faults_are_found_by_step(root: Path) -> None:
    folder = make_run(root)
    for step in (10, 2):
        (folder / f"step_{step:06}").mkdir()
        (folder / f"step_{step:06}" / "state.json").write_text("12345")
    (folder / "step_x").mkdir()
    (folder / ("step_" + "9" * 40)).mkdir()
    (folder / "faults").mkdir()
    (folder / "faults" / "step_7.jsonl").write_text('{"step": 7, "fault": "loss"}\nbroken\n')
    assert [(row["step"], row["bytes"]) for row in run_files.checkpoints_of(only(root))] == [(2, 5), (10, 5)]
    assert list(run_files.fault_steps(only(root))) == [7]
    assert run_files.faults_of(only(root), 7, 5) == [{"step": 7, "fault": "loss"}]
    assert run_files.faults_of(only(root), 8, 5) == []


def test_a_file_is_read_once_until_it_changes_whoever_asks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, number = make_run(root), [0]
    read = run_files.history_of

    def slowly(found: RunFolder) -> Any:
        number[0] += 1
        time.sleep(0.05)
        return read(found)

    monkeypatch.setattr(run_files, "history_of", slowly)
    runs = RunFolders([root])
    found = runs.folder(f"sums~{TIME}")
    readers = [threading.Thread(target=lambda: runs.history(found)) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert number[0] == 1
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4}\n')
    assert runs.history(found).view().last == 4
    assert number[0] == 2


@pytest.mark.parametrize(
    "remove", [lambda folder: (folder / "metrics.jsonl").unlink(), lambda folder: folder.rename("gone")]
)
def test_what_disappears_between_listing_and_reading_is_empty(
    root: Path, monkeypatch: pytest.MonkeyPatch, remove: Callable[[Path], object]
) -> None:
    monkeypatch.chdir(root.parent)
    folder = make_run(root)
    runs = RunFolders([root])
    run, found = next(iter(runs.folders().items()))
    remove(folder)
    assert runs.row(run, found)["step"] == 0
    assert len(runs.history(found)) == 0
    assert run_files.log_lines(found) == []
    assert run_files.checkpoints_of(found) == []


def test_names_that_cannot_be_shown_are_left_out(root: Path) -> None:
    make_run(root)
    make_run(root, "line\nbreak")
    make_run(root, "right\u202eleft")
    (root / os.fsdecode(b"\xff\xfe")).mkdir()
    assert list(RunFolders([root]).folders()) == [f"sums~{TIME}"]
    assert list(RunFolders([root / "nowhere"]).folders()) == []
