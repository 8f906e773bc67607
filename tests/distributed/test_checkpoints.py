"""Who saves what, what is adopted after a failure, and what is handed out."""

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from parallm.checkpoint.format import read_version
from parallm.checkpoint.manager import CheckpointManager
from parallm.checkpoint.settings import CheckpointSettings
from parallm.checkpoint.state import TrainingState
from parallm.distributed.channel import Channel
from parallm.distributed.checkpoints import FollowerCheckpoints, LeaderCheckpoints, _packed, _unpack, adopt_rescued
from parallm.distributed.wire import pack
from parallm.errors import CheckpointError
from tests.checkpoint.conftest import build_state

Channels = Callable[..., list[Channel]]
SETTINGS = CheckpointSettings(keep=1)


def write(root: Path, names: Mapping[str, str]) -> None:
    for name, text in names.items():
        (root / name).mkdir(parents=True)
        (root / name / "state").write_text(text)


def contents(root: Path) -> dict[str, str]:
    return {path.parent.relative_to(root).as_posix(): path.read_text() for path in root.rglob("state")}


def follower_of(run: Path, channel: Channel) -> FollowerCheckpoints:
    return FollowerCheckpoints(run / "ranks" / "1", SETTINGS, leader=run, share=channel.gather, flaw=lambda: "")


def load_both(
    leader: LeaderCheckpoints, follower: FollowerCheckpoints, resume: str
) -> tuple[TrainingState | None, TrainingState | None, Path | None]:
    """What rank 0 and the other one load, and the best checkpoint of the latter."""
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(follower.load, resume)
        return leader.load(resume), loading.result(5), follower.best()


def loaded_by_two(
    run: Path, resume: str, channels: Channels
) -> tuple[TrainingState | None, TrainingState | None, Path | None]:
    first, second = channels(2)[-2:]
    leader = LeaderCheckpoints(run, SETTINGS, share=first.gather, flaw=lambda: "")
    return load_both(leader, follower_of(run, second), resume)


def test_what_the_first_rank_could_not_save_is_adopted_and_the_rest_deleted(tmp_path: Path) -> None:
    write(tmp_path, {"step_000010": "own", "ranks/1/step_000012": "1", "ranks/2/step_000012": "2"})
    write(tmp_path, {"ranks/2/step_000010": "old", "ranks/1/step_000009": "older"})
    adopt_rescued(tmp_path)
    assert contents(tmp_path) == {"step_000010": "own", "step_000012": "1"}


def test_a_run_without_a_checkpoint_adopts_one(tmp_path: Path) -> None:
    write(tmp_path, {"ranks/1/step_000003": "1"})
    adopt_rescued(tmp_path)
    assert contents(tmp_path) == {"step_000003": "1"}


@pytest.mark.parametrize(("resume", "kept"), [("never", []), ("step_000002", ["step_000001", "step_000002"])])
def test_a_rescued_state_is_not_lost_to_newer_steps_of_another_run(
    resume: str, kept: list[str], tmp_path: Path, channels: Channels
) -> None:
    old = CheckpointManager(tmp_path, CheckpointSettings(keep=9))
    for step in (1, 2, 3, 4):
        old.save(build_state(step))
    leader = LeaderCheckpoints(tmp_path, SETTINGS, share=channels(1)[0].gather, flaw=lambda: "")
    leader.load(resume if resume == "never" else str(tmp_path / resume))
    assert [path.name for path in leader.checkpoints()] == kept
    assert len(list(tmp_path.glob("aside_step_*"))) == 4 - len(kept)
    write(tmp_path, {"ranks/1/step_000003": "rescued"})
    adopt_rescued(tmp_path)
    assert leader.checkpoints()[-1] == tmp_path / "step_000003"
    assert contents(tmp_path) == {"step_000003": "rescued"}


def test_checkpoints_of_a_run_that_begins_elsewhere_are_set_aside(tmp_path: Path, channels: Channels) -> None:
    other = CheckpointManager(tmp_path / "other", SETTINGS).save(build_state(9))
    CheckpointManager(tmp_path / "run", SETTINGS).save(build_state(1))
    leader = LeaderCheckpoints(tmp_path / "run", SETTINGS, share=channels(1)[0].gather, flaw=lambda: "")
    leader.load(str(other))
    assert not leader.checkpoints()
    assert other.is_dir()


def test_what_is_handed_out_stays_in_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "a", {"step_000003": "y"})
    _unpack(_packed(tmp_path / "a" / "step_000003", None), tmp_path / "b")
    assert (tmp_path / "b" / "state" / "state").read_text() == "y"
    for head in ({"files": ["../evil"]}, {"files": ["x"], "state": "../a/step_000003"}):
        with pytest.raises(CheckpointError, match="outside"):
            _unpack(pack({"state": None, "best": None, **head}, [np.zeros(1, np.uint8)]), tmp_path / "b")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(("name", "best_step"), [("mine", None), ("run/step_000003", 2), ("run/step_000002", 2)])
def test_all_ranks_resume_from_the_checkpoint_that_the_command_names(
    name: str, best_step: int | None, tmp_path: Path, channels: Channels
) -> None:
    run = tmp_path / "run"
    old = CheckpointManager(run, CheckpointSettings(keep=9))
    for step, score in ((2, 0.5), (3, None), (4, 0.9)):
        old.save(build_state(step, score=score))
    shutil.copytree(run / "step_000003", tmp_path / "mine")
    resumed, loaded, best = loaded_by_two(run, str(tmp_path / name), channels)
    assert resumed is not None
    assert loaded is not None
    assert (loaded.step, loaded.adapter.digest) == (resumed.step, resumed.adapter.digest)
    assert resumed.step == (2 if name.endswith("2") else 3)
    assert (best and read_version(best)) == best_step


def test_what_was_handed_out_at_an_earlier_start_counts_for_nothing(tmp_path: Path, channels: Channels) -> None:
    CheckpointManager(tmp_path, SETTINGS).save(build_state(4, score=0.9))
    assert None not in loaded_by_two(tmp_path, "auto", channels)
    assert loaded_by_two(tmp_path, "never", channels) == (None, None, None)
    assert loaded_by_two(tmp_path, "auto", channels) == (None, None, None)


def test_all_ranks_resume_from_what_the_first_has_and_know_the_best(tmp_path: Path, channels: Channels) -> None:
    first, second = channels(2)
    leader = LeaderCheckpoints(tmp_path, SETTINGS, share=first.gather, flaw=lambda: "")
    follower = follower_of(tmp_path, second)
    for state in (build_state(3, score=0.5), build_state(7)):
        leader.save(state)
        assert follower.save(state) == tmp_path / f"step_{state.step:06d}"
    resumed, loaded, best = load_both(leader, follower, "auto")
    assert resumed is not None
    assert loaded is not None
    assert loaded.step == resumed.step == 7
    assert loaded.adapter.digest == resumed.adapter.digest
    assert best is not None
    assert read_version(best) == 3
    assert not list((tmp_path / "ranks" / "1").glob("step_*"))
    first.fail("rank 0 is gone")
    assert follower.save(build_state(8)).parent == tmp_path / "ranks" / "1"
    adopt_rescued(tmp_path)
    assert leader.checkpoints()[-1].name == "step_000008"


def test_nothing_is_saved_of_versions_that_differ(tmp_path: Path, channels: Channels) -> None:
    share = channels(1)[0].gather
    checkpoints = LeaderCheckpoints(tmp_path, SETTINGS, share=share, flaw=lambda: "the workers' versions differ")
    with pytest.raises(CheckpointError, match="differ"):
        checkpoints.save(build_state(1))
    assert not checkpoints.checkpoints()


def test_what_the_first_rank_has_not_written_to_its_end_the_others_save(tmp_path: Path, channels: Channels) -> None:
    first, second = channels(2)
    follower = follower_of(tmp_path, second)
    folders: list[Path] = []
    thread = threading.Thread(target=lambda: folders.append(follower.save(build_state(5))))
    thread.start()
    time.sleep(0.1)
    assert not folders, "the first rank may still be lost"
    first.fail("rank 0 is gone")
    thread.join(5)
    assert [folder.parent.name for folder in folders] == ["1"]


def test_an_error_of_one_rank_alone_lets_it_wait_for_no_other(tmp_path: Path, channels: Channels) -> None:
    assert follower_of(tmp_path, channels(2)[1]).rescue(build_state(5)).parent == tmp_path / "ranks" / "1"


def test_what_keeps_the_first_rank_from_saving_is_told_to_the_others(tmp_path: Path, channels: Channels) -> None:
    first, second = channels(2)
    leader = LeaderCheckpoints(tmp_path, SETTINGS, share=first.gather, flaw=lambda: "the disk is full")
    for checkpoints in (leader, follower_of(tmp_path, second)):
        with pytest.raises(CheckpointError, match="the disk is full"):
            checkpoints.save(build_state(5))
