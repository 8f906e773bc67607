"""Policy nets outlive a restart: names, versions, answers; what the disk refuses leaves everything as it was."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from parallm.device.governor import Governor
from parallm.device.thread import DeviceThread
from parallm.errors import CheckpointError, FolderInUse, ModelError, NotStored, UnknownModel
from parallm.tasks.actor import KEPT_VERSIONS, Actor
from parallm.tasks.net_folder import STATE, WEIGHTS, NetFolder
from tests.tasks.policy_files import GRU, MLP, policy_file, weights_of, write_policy

OBSERVATIONS = np.random.default_rng(3).normal(size=(5, 4)).astype(np.float32)


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    thread = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    yield thread
    thread.stop()


class Process:
    """What a server process does with a folder; `end` is its end, also by a kill."""

    def __init__(self, device: DeviceThread, folder: Path, given: dict[str, str] | None = None) -> None:
        self.folder = NetFolder(folder)
        self.actor = Actor(device, max_names=4, max_waiting=8, folder=self.folder)
        asyncio.run(self.actor.load(given or {}))

    def publish(self, name: str = "agent", config: dict[str, object] = MLP, seed: int = 0) -> None:
        asyncio.run(self.actor.publish(name, policy_file(config, weights_of(config, seed))))

    def names(self) -> list[str]:
        return [f"{card.name}@{card.version}" for card in self.actor.cards()]

    def values(self, model: str) -> np.ndarray:
        outputs = asyncio.run(self.actor.run(model, {"obs": OBSERVATIONS}))
        return next(outputs[name] for name in ("logits", "value") if name in outputs)

    def end(self) -> None:
        self.folder.close()


def test_nets_versions_and_numbers_outlive_a_restart(device: DeviceThread, tmp_path: Path) -> None:
    first = Process(device, tmp_path / "nets")
    for seed in range(3):
        first.publish(seed=seed)
    first.publish("other", GRU)
    asyncio.run(first.actor.publish("other", policy_file(None, weights_of(GRU, 5))))  # without a form of its own
    asyncio.run(first.actor.unload("agent@2"))
    names, answers = first.names(), [first.values(name) for name in ("agent@1", "agent", "other@1", "other")]
    assert names == ["agent@1", "agent@3", "other@1", "other@2"]
    first.end()
    second = Process(device, tmp_path / "nets")
    assert second.names() == names
    for name, answer in zip(("agent@1", "agent", "other@1", "other"), answers, strict=True):
        assert np.array_equal(second.values(name), answer)
    asyncio.run(second.actor.unload("agent"))
    second.end()
    third = Process(device, tmp_path / "nets", {"agent": str(write_policy(tmp_path / "given", MLP))})
    assert third.names() == ["other@1", "other@2"], "what clients have forgotten does not come back"
    third.publish()
    assert third.names()[-1] == "agent@4", "nor do its numbers"
    third.end()


def test_without_a_folder_nothing_is_kept(device: DeviceThread, tmp_path: Path) -> None:
    """The control."""
    actor = Actor(device, max_names=4, max_waiting=8)
    asyncio.run(actor.publish("agent", policy_file(MLP)))
    assert not actor._unstored
    assert Process(device, tmp_path / "nets").names() == []


def test_a_net_of_the_settings_is_that_of_its_folder_until_a_client_changes_it(
    device: DeviceThread, tmp_path: Path
) -> None:
    given = {"agent": str(write_policy(tmp_path / "given", MLP))}
    first = Process(device, tmp_path / "nets", given)
    assert not (tmp_path / "nets").exists()
    first.publish(seed=1)
    first.end()
    assert Process(device, tmp_path / "nets", given).names() == ["agent@1", "agent@2"]


def test_the_disk_has_the_weights_of_what_is_kept_alone(device: DeviceThread, tmp_path: Path) -> None:
    process = Process(device, tmp_path / "nets")
    for seed in range(KEPT_VERSIONS + 3):
        process.publish(seed=seed)
    assert len(list((tmp_path / "nets" / WEIGHTS).iterdir())) == KEPT_VERSIONS
    process.end()


def test_a_disk_that_refuses_leaves_what_was(
    device: DeviceThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(device, tmp_path / "nets")
    process.publish()

    def refuse(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("parallm.tasks.net_folder.write_atomically", refuse)
    with pytest.raises(NotStored, match=r"agent is as it was: .*no space left"):
        process.publish(seed=1)
    with pytest.raises(NotStored):
        asyncio.run(process.actor.unload("agent"))
    assert process.names() == ["agent@1"]
    monkeypatch.undo()
    process.publish(seed=1)
    assert process.names() == ["agent@1", "agent@2"]
    process.end()
    assert Process(device, tmp_path / "nets").names() == ["agent@1", "agent@2"]


def test_a_second_process_changes_nothing(device: DeviceThread, tmp_path: Path) -> None:
    first = Process(device, tmp_path / "nets")
    first.publish()
    second = Process(device, tmp_path / "nets")
    assert second.names() == []
    with pytest.raises(FolderInUse, match=r"process"):
        second.publish(seed=1)
    with pytest.raises(UnknownModel):
        asyncio.run(second.actor.unload("agent"))
    first.end()


@pytest.mark.parametrize("damage", ["state", "format", "weights", "missing"])
def test_what_is_damaged_is_named_with_the_way_out(device: DeviceThread, tmp_path: Path, damage: str) -> None:
    process, nets = Process(device, tmp_path / "nets"), tmp_path / "nets"
    process.publish()
    process.end()
    (weights,) = (nets / WEIGHTS).iterdir()
    if damage == "state":
        (nets / STATE).write_text("{")
    elif damage == "format":
        (nets / STATE).write_text(json.dumps(json.loads((nets / STATE).read_text()) | {"format": 2}))
    elif damage == "weights":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        weights.unlink()
    with pytest.raises(CheckpointError, match=r"policy nets cannot be read from .*server.state=off"):
        Process(device, nets)


def test_wrong_folders_of_the_settings_are_named(device: DeviceThread, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tasks.policies.agent="):
        Process(device, tmp_path / "nets", {"agent": str(tmp_path)})
