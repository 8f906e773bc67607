import dataclasses
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from parallm.checkpoint import format
from parallm.checkpoint.manager import CheckpointManager
from parallm.checkpoint.settings import CheckpointSettings
from parallm.checkpoint.state import Fingerprint, TrainingState
from parallm.errors import CheckpointError

MakeState = Callable[..., TrainingState]
MANIFESTED = [
    "adapter/adapters.safetensors",
    "adapter/adapter_config.json",
    "optimizer.safetensors",
    "state.json",
    "manifest.json",
]


def manager(folder: Path, keep: int = 3) -> CheckpointManager:
    return CheckpointManager(folder, CheckpointSettings(keep=keep))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_auto_resumes_from_the_newest_checkpoint(make_state: MakeState, tmp_path: Path) -> None:
    for step in (2, 10, 100):
        manager(tmp_path).save(make_state(step))
    loaded = manager(tmp_path).load("auto")
    assert loaded is not None
    assert (loaded.step, loaded.adapter.digest) == (100, make_state(100).adapter.digest)


def test_auto_finds_nothing_in_a_new_folder(tmp_path: Path) -> None:
    assert manager(tmp_path / "new").load("auto") is None


def test_never_ignores_what_is_there(make_state: MakeState, tmp_path: Path) -> None:
    manager(tmp_path).save(make_state(1))
    assert manager(tmp_path).load("never") is None


def test_a_named_checkpoint_of_another_run_is_loaded(make_state: MakeState, tmp_path: Path) -> None:
    path = manager(tmp_path / "one").save(make_state(7))
    loaded = manager(tmp_path / "two").load(str(path))
    assert loaded is not None
    assert loaded.step == 7


def nest_deeply(path: Path) -> None:
    path.write_text("[" * 100_000)


@pytest.mark.parametrize("damage", [truncate, flip_byte, nest_deeply, Path.unlink])
@pytest.mark.parametrize("file", MANIFESTED)
def test_a_damaged_newest_checkpoint_costs_one_checkpoint(
    make_state: MakeState, damage: Callable[[Path], None], file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager(tmp_path).save(make_state(1))
    damage(manager(tmp_path).save(make_state(2)) / file)
    loaded = manager(tmp_path).load("auto")
    assert loaded is not None
    assert loaded.step == 1
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "step_000002 was set aside" in warning


def test_the_warning_names_the_reason(make_state: MakeState, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    truncate(manager(tmp_path).save(make_state(1)) / "optimizer.safetensors")
    assert manager(tmp_path).load("auto") is None
    assert re.search(r"optimizer\.safetensors has \d+ bytes, \d+ were saved", caplog.text)
    assert f"none of the 1 checkpoints of {tmp_path} is good: the run begins anew" in caplog.text


def test_every_single_flipped_bit_of_the_manifest_is_noticed_or_harmless(make_state: MakeState, tmp_path: Path) -> None:
    path = manager(tmp_path).save(make_state(1)) / "manifest.json"
    content = path.read_bytes()
    overlooked = []
    for place, bit in product(range(len(content)), range(8)):
        flipped = content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :]
        path.write_bytes(flipped)
        if is_read(path.parent) and json.loads(flipped) != json.loads(content):
            overlooked.append((place, bit))
    assert overlooked == []


def is_read(folder: Path) -> bool:
    try:
        format.read_checkpoint(folder)
    except CheckpointError:
        return False
    return True


def test_a_damaged_checkpoint_that_was_named_is_an_error(make_state: MakeState, tmp_path: Path) -> None:
    path = manager(tmp_path).save(make_state(1))
    flip_byte(path / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is corrupt"):
        manager(tmp_path).load(str(path))
    assert path.exists()


def test_a_folder_that_is_no_checkpoint_names_those_there_are(make_state: MakeState, tmp_path: Path) -> None:
    manager(tmp_path).save(make_state(4))
    with pytest.raises(CheckpointError, match=r"name never, auto or one of .*step_000004"):
        manager(tmp_path).load(str(tmp_path))


def test_what_a_killed_process_left_is_ignored_and_removed(make_state: MakeState, tmp_path: Path) -> None:
    path = manager(tmp_path).save(make_state(1))
    shutil.copytree(path, tmp_path / f".tmp-step_000002-{dead_process()}")
    loaded = manager(tmp_path).load("auto")
    assert loaded is not None
    assert (loaded.step, names(tmp_path)) == (1, ["step_000001"])


def test_a_save_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / f".tmp-step_000002-{os.getppid()}").mkdir()
    manager(tmp_path)
    assert names(tmp_path) == [f".tmp-step_000002-{os.getppid()}"]


def test_a_checkpoint_whose_replacement_was_interrupted_comes_back(make_state: MakeState, tmp_path: Path) -> None:
    path = manager(tmp_path).save(make_state(1))
    path.rename(tmp_path / ".old-step_000001")
    loaded = manager(tmp_path).load("auto")
    assert loaded is not None
    assert names(tmp_path) == ["step_000001"]


def test_saving_a_step_again_replaces_it(make_state: MakeState, tmp_path: Path) -> None:
    manager(tmp_path).save(make_state(1))
    path = manager(tmp_path).save(make_state(1, score=0.5))
    assert (format.read_checkpoint(path).score, names(tmp_path)) == (0.5, ["step_000001"])


def test_what_could_not_be_removed_of_a_step_does_not_keep_it_from_being_saved_again(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoints = manager(tmp_path)
    with monkeypatch.context() as patch:  # as where another process holds a file of it open on a network disk
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        for score in (0.1, 0.2, 0.3):
            path = checkpoints.save(make_state(1, score=score))
    assert ".old-step_000001" in names(tmp_path)
    assert format.read_checkpoint(path).score == 0.3
    path = checkpoints.save(make_state(1, score=0.4))
    assert format.read_checkpoint(path).score == 0.4
    manager(tmp_path)
    assert names(tmp_path) == ["step_000001"]


def test_the_newest_and_the_best_are_kept(make_state: MakeState, tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep=2)
    for step, score in ((1, 0.5), (2, 0.8), (3, None), (4, 0.7), (5, 0.6)):
        checkpoints.save(make_state(step, score=score))
    assert names(tmp_path) == ["step_000002", "step_000004", "step_000005"]
    assert checkpoints.best() == tmp_path / "step_000002"


def test_of_equally_good_checkpoints_the_newest_is_the_best(make_state: MakeState, tmp_path: Path) -> None:
    for step in (1, 2):
        manager(tmp_path).save(make_state(step, score=0.5))
    assert manager(tmp_path).best() == tmp_path / "step_000002"


def test_going_on_from_an_older_checkpoint_sets_the_newer_aside(make_state: MakeState, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        manager(tmp_path).save(make_state(step))
    manager(tmp_path, keep=1).save(make_state(21))
    assert names(tmp_path) == ["aside_step_000030.0", "step_000021"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_sha256": "cd" * 32}, r"was trained on the base nano .*set model\.path"),
        ({"rank": 16}, r"LoRA rank 2, this run 16; set model\.lora\.rank=2"),
        ({"alpha": 32.0}, r"LoRA alpha 5\.0, this run 32\.0; set model\.lora\.alpha=5\.0"),
        ({"rslora": True}, r"LoRA rslora False, this run True; set model\.lora\.rslora=false"),
        ({"dora": True}, r"LoRA dora False, this run True; set model\.lora\.dora=false"),
        (
            {"ranks": {"model.layers.0.self_attn.q_proj": 8}},
            r"has rank 2 at .*q_proj, this run 8; set model\.lora\.ranks as in that run",
        ),
        ({"targets": ()}, r"adapts 1 layers, this run 0; .*set model\.lora\.targets and model\.lora\.layers"),
    ],
)
def test_a_checkpoint_of_another_model_or_adapter_is_refused(
    make_state: MakeState, change: dict[str, object], message: str, tmp_path: Path
) -> None:
    state = make_state(1)
    manager(tmp_path).save(state)
    with pytest.raises(CheckpointError, match=message):
        manager(tmp_path).load("auto", Fingerprint(**(dataclasses.asdict(state.fingerprint) | change)))


def test_a_checkpoint_of_before_there_were_forms_fits_plain_lora(make_state: MakeState, tmp_path: Path) -> None:
    state = make_state(1)
    path = manager(tmp_path).save(state)
    values = json.loads((path / "state.json").read_text())
    for name in ("ranks", "rslora", "dora"):
        del values["fingerprint"][name]
    (path / "state.json").write_text(json.dumps(values))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = {
        "bytes": (path / "state.json").stat().st_size,
        "sha256": hashlib.sha256((path / "state.json").read_bytes()).hexdigest(),
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert manager(tmp_path).load("auto", state.fingerprint) is not None


def test_the_same_base_in_another_place_is_accepted(make_state: MakeState, tmp_path: Path) -> None:
    state = make_state(1)
    manager(tmp_path).save(state)
    moved = dataclasses.replace(state.fingerprint, model="/elsewhere/nano")
    assert manager(tmp_path).load("auto", moved) is not None


def test_a_disk_that_fills_up_while_saving_costs_nothing_but_that_save(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoints = manager(tmp_path)
    checkpoints.save(make_state(1))

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(format, "write_arrays", fail)
        with pytest.raises(CheckpointError, match=r"the disk is full: [\d,]+ bytes are free, about [\d,]+ are needed"):
            checkpoints.save(make_state(2))
    assert names(tmp_path) == ["step_000001"]
    checkpoints.save(make_state(3))
    assert names(tmp_path) == ["step_000001", "step_000003"]


def test_a_disk_that_has_less_room_than_a_checkpoint_needs_is_not_filled_with_half_of_one(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[object] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=format.needed_bytes(make_state(1)) - 1))
    monkeypatch.setattr("parallm.checkpoint.manager.write_checkpoint", lambda *arguments: written.append(arguments))
    with pytest.raises(CheckpointError, match="the disk is full"):
        manager(tmp_path).save(make_state(1))
    assert written == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; skips where this user may not mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if sys.platform != "linux" or mount is None or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a small file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("free", [None, 10**9])
def test_a_really_full_disk_leaves_the_older_checkpoint_whole(
    make_state: MakeState, small_disk: Path, free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = manager(small_disk)
    checkpoints.save(make_state(1))
    large = dataclasses.replace(make_state(2), optimizer={"m": mx.zeros((1024, 1024))})
    with monkeypatch.context() as patch:
        if free is not None:  # a quota: more seems to be free than there is
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        with pytest.raises(CheckpointError, match="the disk is full"):
            checkpoints.save(large)
    assert names(small_disk) == ["step_000001"]
    loaded = manager(small_disk).load("auto")
    assert loaded is not None
    assert loaded.step == 1


@pytest.fixture
def disk_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str, int]]:
    """What the disk is asked for, in order: (fsync, path, bytes at that moment) and (rename, the new path, 0)."""
    calls: list[tuple[str, str, int]] = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(descriptor: int) -> None:
        asked = os.fstat(descriptor)
        (path,) = (path for path in (tmp_path, *tmp_path.rglob("*")) if os.path.samestat(path.stat(), asked))
        calls.append(("fsync", path.relative_to(tmp_path).as_posix(), 0 if path.is_dir() else asked.st_size))
        fsync(descriptor)

    def recorded_rename(path: Path, target: Path) -> Path:
        calls.append(("rename", target.relative_to(tmp_path).as_posix(), 0))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    return calls


def test_a_checkpoint_gets_its_name_when_the_disk_has_all_of_it_and_the_disk_has_the_name_afterwards(
    make_state: MakeState, disk_calls: list[tuple[str, str, int]], tmp_path: Path
) -> None:
    """After a power loss there is the old state or the new one, and a save that has returned is on the disk."""
    checkpoints = manager(tmp_path)
    for score in (0.1, 0.2):  # the second one replaces the first
        disk_calls.clear()
        path = checkpoints.save(make_state(1, score=score))
        renamed = disk_calls.index(("rename", "step_000001", 0))
        before = {name: size for kind, name, size in disk_calls[:renamed] if kind == "fsync"}
        temporary = f".tmp-step_000001-{os.getpid()}"
        sizes = {f"{temporary}/{file}": (path / file).stat().st_size for file in MANIFESTED}
        assert before == sizes | {temporary: 0, f"{temporary}/adapter": 0}
        assert disk_calls[renamed + 1 :] == [("fsync", ".", 0)]
    assert disk_calls[renamed - 1] == ("rename", ".old-step_000001", 0)


def test_the_disk_has_the_folder_of_named_checkpoints_before_the_first_one_is_in_it(
    make_state: MakeState, disk_calls: list[tuple[str, str, int]], tmp_path: Path
) -> None:
    manager(tmp_path).save_as(make_state(1), "first")
    renamed = disk_calls.index(("rename", "named/first", 0))
    assert disk_calls[renamed - 1 :] == [("fsync", ".", 0), ("rename", "named/first", 0), ("fsync", "named", 0)]


def test_a_folder_that_cannot_be_written_is_an_error_with_the_reason(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoints = manager(tmp_path)
    tmp_path.rmdir()
    tmp_path.write_text("a file now")
    with pytest.raises(CheckpointError, match=r"could not be saved: .*; older checkpoints are unchanged"):
        checkpoints.save(make_state(1))
    tmp_path.unlink()


@pytest.mark.parametrize("counters", [{"seeds": {1: 2}}, {"random": object()}], ids=["odd keys", "no JSON"])
def test_a_statistic_that_cannot_be_written_costs_nothing_but_that_save(
    make_state: MakeState, counters: dict[str, object], tmp_path: Path
) -> None:
    checkpoints = manager(tmp_path)
    checkpoints.save(make_state(1))
    with pytest.raises(CheckpointError, match=r"step_000002 could not be saved: .*; older checkpoints are unchanged"):
        checkpoints.save(dataclasses.replace(make_state(2), counters=counters))
    assert names(tmp_path) == ["step_000001"]


def test_arrays_that_cannot_be_computed_cost_nothing_but_that_save(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 9 bytes")

    monkeypatch.setattr(format, "write_arrays", fail)
    with pytest.raises(CheckpointError, match=r"could not be saved: .malloc. Unable to allocate 9 bytes; older"):
        manager(tmp_path).save(make_state(1))
    assert names(tmp_path) == []


SAVE_FOREVER = """
import sys
from dataclasses import replace
from pathlib import Path
from parallm.checkpoint.format import read_checkpoint
from parallm.checkpoint.manager import CheckpointManager
from parallm.checkpoint.settings import CheckpointSettings

state = read_checkpoint(Path(sys.argv[1]))
manager = CheckpointManager(Path(sys.argv[2]), CheckpointSettings(keep=1))
print("ready", flush=True)
for step in range(2, 10**6):
    manager.save(replace(state, step=step // 2))
"""


@pytest.mark.parametrize("milliseconds", [13, 22, 31])
def test_a_process_killed_while_saving_leaves_a_good_checkpoint(
    make_state: MakeState, milliseconds: int, tmp_path: Path
) -> None:
    source = manager(tmp_path / "source").save(make_state(1))
    run = tmp_path / "run"
    shutil.copytree(source, run / "step_000000")
    kill_after(milliseconds / 1000, source, run)
    loaded = manager(run).load("auto")
    assert loaded is not None
    assert loaded.adapter.digest == make_state(1).adapter.digest
    assert [name for name in names(run) if not name.startswith("step_")] == []


def kill_after(seconds: float, source: Path, run: Path) -> None:
    command = [sys.executable, "-c", SAVE_FOREVER, str(source), str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(seconds)
        process.kill()


def dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid
