"""What FOLDER and FOLDER@VERSION mean."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from parallm.checkpoint.adapter_paths import find_adapter, find_adapters
from parallm.checkpoint.manager import CheckpointManager
from parallm.checkpoint.settings import CheckpointSettings
from parallm.checkpoint.state import TrainingState
from parallm.errors import AdapterError

MakeState = Callable[..., TrainingState]


@pytest.fixture
def run(make_state: MakeState, tmp_path: Path) -> Path:
    """A run with checkpoints of versions 10, 20 and 30, of which 20 was the best."""
    manager = CheckpointManager(tmp_path / "run", CheckpointSettings(keep=9))
    for step, score in ((10, 0.5), (20, 0.75), (30, 0.25)):
        manager.save(make_state(step, score=score))
    return tmp_path / "run"


def test_a_run_is_its_best_checkpoint(run: Path) -> None:
    assert find_adapter(str(run)) == run / "step_000020" / "adapter"


def test_a_run_without_evaluations_is_its_newest_checkpoint(make_state: MakeState, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, CheckpointSettings())
    for step in (10, 20):
        manager.save(make_state(step))
    assert find_adapter(str(tmp_path)) == tmp_path / "step_000020" / "adapter"


@pytest.mark.parametrize("kind", ["pipe", "deep"])
def test_a_state_that_is_a_pipe_or_nested_for_ever_is_passed_over(run: Path, kind: str) -> None:
    state = run / "step_000020" / "state.json"
    state.unlink()
    if kind == "pipe":
        os.mkfifo(state)
    else:
        state.write_text("[" * 100_000)
    assert find_adapter(str(run)) == run / "step_000010" / "adapter"
    assert find_adapter(f"{run}@30") == run / "step_000030" / "adapter"


def test_a_version_of_a_run_is_named_after_an_at(run: Path) -> None:
    assert find_adapter(f"{run}@10") == run / "step_000010" / "adapter"
    assert find_adapter(f"{run}@newest") == run / "step_000030" / "adapter"


def test_a_link_to_a_run_is_that_run_by_its_own_name(run: Path) -> None:
    link = run.parent / "latest"
    link.symlink_to("run")
    assert find_adapter(str(link)) == run / "step_000020" / "adapter"
    assert find_adapter(f"{link}@10") == run / "step_000010" / "adapter"


def test_all_versions_come_in_the_order_of_training(run: Path) -> None:
    assert [path.parent.name for path in find_adapters(f"{run}@all")] == ["step_000010", "step_000020", "step_000030"]


def test_a_checkpoint_and_an_adapter_name_themselves(run: Path) -> None:
    adapter = run / "step_000010" / "adapter"
    assert find_adapter(str(run / "step_000010")) == find_adapter(str(adapter)) == adapter


def test_a_folder_may_have_an_at_in_its_name(run: Path) -> None:
    renamed = run.rename(run.with_name("run@home"))
    assert find_adapter(str(renamed)) == renamed / "step_000020" / "adapter"
    assert find_adapter(f"{renamed}@10") == renamed / "step_000010" / "adapter"


def test_a_folder_of_several_policies_or_runs_asks_which(run: Path) -> None:
    with pytest.raises(AdapterError, match=f"holds several policies or runs; name one: {run}$"):
        find_adapter(str(run.parent))


def test_of_the_runs_of_a_name_the_newest_is_offered(run: Path) -> None:
    (run.parent / "latest").symlink_to("run")
    for asked in (f"{run.parent}", f"{run.parent}@10"):
        with pytest.raises(AdapterError, match=f"several policies or runs; name one: {run.parent / 'latest'}$"):
            find_adapter(asked)


def test_only_the_adapter_is_left_of_a_run(run: Path, tmp_path: Path) -> None:
    (run / "step_000010" / "adapter").rename(tmp_path / "adapter")
    assert find_adapter(str(tmp_path)) == tmp_path / "adapter"


def test_a_version_that_was_not_kept_is_refused_with_those_that_were(run: Path) -> None:
    with pytest.raises(AdapterError, match="no version '15'; checkpoints are kept of the versions 10, 20, 30"):
        find_adapters(f"{run}@15")


def test_one_adapter_is_not_several(run: Path) -> None:
    with pytest.raises(AdapterError, match=r"names 3 adapters; choose one of the versions \[10, 20, 30\]"):
        find_adapter(f"{run}@all")


def test_a_single_adapter_has_no_versions(run: Path) -> None:
    with pytest.raises(AdapterError, match="holds a single adapter; leave out @3"):
        find_adapter(f"{run / 'step_000010'}@3")


def test_another_folder_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(AdapterError, match=r"neither an adapter, a checkpoint nor a run: it holds notes\.txt"):
        find_adapter(str(tmp_path))
    with pytest.raises(AdapterError, match="nor a run: there is no such folder"):
        find_adapter(str(tmp_path / "nothing"))
