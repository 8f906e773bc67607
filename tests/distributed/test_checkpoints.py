"""Who saves what, what is adopted after a failure, and what is handed out."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from parallm.checkpoint.settings import CheckpointSettings
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


def test_what_the_first_rank_could_not_save_is_adopted_and_the_rest_deleted(tmp_path: Path) -> None:
    write(tmp_path, {"step_000010": "own", "ranks/1/step_000012": "1", "ranks/2/step_000012": "2"})
    write(tmp_path, {"ranks/2/step_000010": "old", "ranks/1/step_000009": "older"})
    adopt_rescued(tmp_path)
    assert contents(tmp_path) == {"step_000010": "own", "step_000012": "1"}


def test_a_run_without_a_checkpoint_adopts_one(tmp_path: Path) -> None:
    write(tmp_path, {"ranks/1/step_000003": "1"})
    adopt_rescued(tmp_path)
    assert contents(tmp_path) == {"step_000003": "1"}


def test_what_is_handed_out_stays_in_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "a", {"step_000003": "y"})
    _unpack(_packed([tmp_path / "a" / "step_000003"]), tmp_path / "b")
    assert contents(tmp_path / "b") == {"step_000003": "y"}
    with pytest.raises(CheckpointError, match="outside"):
        _unpack(pack(["../evil"], [np.zeros(1, np.uint8)]), tmp_path / "b")
    assert not (tmp_path / "evil").exists()


def test_all_ranks_resume_from_what_the_first_has_and_know_the_best(tmp_path: Path, channels: Channels) -> None:
    first, second = channels(2)
    failures: list[str] = []
    leader = LeaderCheckpoints(tmp_path, SETTINGS, share=partial(first.gather, "x"), flaw=lambda: "")
    follower = FollowerCheckpoints(
        tmp_path / "ranks" / "1",
        SETTINGS,
        leader=tmp_path,
        has_failed=lambda: bool(failures),
        share=partial(second.gather, "x"),
        flaw=lambda: "",
    )
    for state in (build_state(3, score=0.5), build_state(7)):
        leader.save(state)
        assert follower.save(state) == tmp_path / f"step_{state.step:06d}"
    loaded = []
    thread = threading.Thread(target=lambda: loaded.append(follower.load("auto")))
    thread.start()
    resumed = leader.load("auto")
    thread.join(5)
    assert resumed is not None
    assert loaded[0] is not None
    assert loaded[0].step == resumed.step == 7
    assert loaded[0].adapter.digest == resumed.adapter.digest
    best = follower.best()
    assert best is not None
    assert best.name == "step_000003"
    assert not list((tmp_path / "ranks" / "1").glob("step_*"))
    failures.append("rank 0 is gone")
    assert follower.save(build_state(8)).parent == tmp_path / "ranks" / "1"
    adopt_rescued(tmp_path)
    assert leader.checkpoints()[-1].name == "step_000008"


def test_nothing_is_saved_of_versions_that_differ(tmp_path: Path, channels: Channels) -> None:
    share = partial(channels(1)[0].gather, "x")
    checkpoints = LeaderCheckpoints(tmp_path, SETTINGS, share=share, flaw=lambda: "the workers' versions differ")
    with pytest.raises(CheckpointError, match="differ"):
        checkpoints.save(build_state(1))
    assert not checkpoints.checkpoints()
