"""What operators set, in the next process."""

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import pytest

from parallm.checkpoint import format, serving_state
from parallm.checkpoint.adapter_store import AdapterStore
from parallm.checkpoint.persistent_table import PersistentTable
from parallm.checkpoint.serving_state import STATE, ServingFolder
from parallm.device.governor import Governor
from parallm.device.thread import DeviceThread
from parallm.errors import AdapterError, CheckpointError, FolderInUse, NotStored, UnknownModel
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.files import write_mlx, write_peft
from parallm.model.adapters.initial import initial_arrays, starting_adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.load import load_shared_model
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel

Result = TypeVar("Result")


class Process:
    """A process as far as adapters are concerned, from its start to its end."""

    def __init__(
        self, device: DeviceThread, model: SharedModel, folder: Path, root: Path, trained: Mapping[str, int]
    ) -> None:
        """`trained`: policies in training, each with the version that its trainer goes on with."""
        self.table = AdapterTable(policies=tuple(trained) or ("policy",))
        self.folder = ServingFolder(folder, model)
        self.kept = PersistentTable(device, self.table, trained=trained, folder=self.folder, state=self.folder.read())
        self.store = AdapterStore(
            device,
            model,
            self.kept,
            root=str(root),
            max_bytes=10_000_000,
            max_names=8,
            start=device.call(partial(starting_adapter, ModelSettings(), model, 0)).result(60),
        )
        self.model = model
        for name, version in trained.items():
            if version:
                self.table.publish(adapter_of(model, name, version))
        run(self.kept.restore(trained))

    def state(self) -> dict[str, Any]:
        """Everything that clients can tell."""
        cards = self.table.cards()
        return {
            "versions": [(card.name, card.version, card.digest, card.is_served) for card in cards],
            "aliases": dict(self.table.aliases),
            "splits": {name: dict(shares) for name, shares in self.store.splits.items()},
            "next": {name: self.table.next_version(name) for name in ("poet", "coder", "gone")},
        }


Start = Callable[..., Process]


def adapter_of(model: SharedModel, name: str, version: int) -> Adapter:
    arrays = initial_arrays(model.targets, 2, mx.random.key(version), ranks={})
    shifted = {key: array + 0.01 * version for key, array in arrays.items()}
    return make_adapter(shifted, name=name, version=version, rank=2, alpha=4)


def run(work: Awaitable[Result]) -> Result:
    async def main() -> Result:
        return await work

    return asyncio.run(main())


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceThread]:
    made = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def model(device: DeviceThread, tiny_model: Callable[[str], Path]) -> SharedModel:
    return device.call(partial(load_shared_model, ModelSettings(path=str(tiny_model("llama"))))).result(60)


@pytest.fixture(scope="module")
def root(device: DeviceThread, model: SharedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters `a`, `b` and `c`; mlx-lm's format cannot hold `c`."""
    folder = tmp_path_factory.mktemp("root")

    def write() -> None:
        write_mlx(adapter_of(model, "a", 1), folder / "a", num_layers=model.num_layers)
        write_peft(adapter_of(model, "b", 2), folder / "b", "tiny", model_type="llama")
        last = adapter_of(model, "c", 3)
        uneven = dict.fromkeys(last.targets[:1], 2.5)
        last = make_adapter(dict(last.arrays), version=3, rank=2, alpha=4, alphas=uneven)
        write_peft(last, folder / "c", "tiny", model_type="llama")

    device.call(write).result(60)
    return folder


@pytest.fixture
def start(device: DeviceThread, model: SharedModel, root: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a process on the same folder; the one before it was killed, which frees its lock."""
    started: list[Process] = []

    def begin(**trained: int) -> Process:
        for one in started:
            one.kept.close()
        started.append(Process(device, model, tmp_path / "serving", root, trained))
        return started[-1]

    yield begin
    for one in started:
        one.kept.close()


def test_nothing_is_written_before_the_first_change(start: Start, tmp_path: Path) -> None:
    process = start()
    with pytest.raises(AdapterError):
        run(process.store.load("poet", "nothing"))
    with pytest.raises(UnknownModel):
        run(process.store.promote("poet", 3))
    assert list(tmp_path.iterdir()) == []


def set_everything(process: Process, root: Path) -> None:
    store = process.store
    run(store.load("poet", "a"))
    run(store.load("poet", "b"))
    run(store.load("poet", "c"))
    run(store.load("coder", "a"))
    run(store.load("gone", "b"))
    run(store.update("poet", tensors(process)))
    run(store.promote("poet", 2))
    run(store.set_alias("good", "poet", 3))
    run(store.set_alias("bad", "coder", 1))
    run(store.remove_alias("bad", "coder"))
    run(store.unload("poet", 1))
    run(store.unload("gone"))
    run(store.set_splits({"ab": {"poet@3": 0.25, "base": 0.75}}))


def tensors(process: Process) -> bytes:
    served = process.table.resolve("poet")
    assert served is not None
    target = served.targets[0]
    file = process.folder.folder.parent / "tensors"
    mx.save_safetensors(str(file), {f"{target}.lora_a": served.arrays[f"{target}.lora_a"] * 2})
    return file.with_suffix(".safetensors").read_bytes()


def test_all_that_was_set_is_the_same_in_the_next_process_and_the_one_after(start: Start, root: Path) -> None:
    process = start()
    set_everything(process, root)
    before = process.state()
    assert [name for name, *_ in before["versions"]] == ["coder", "poet", "poet", "poet"]
    assert before["next"] == {"poet": 5, "coder": 2, "gone": 2}
    for _ in range(2):
        process = start()
        assert process.state() == before
    kept = process.table.resolve("poet@3")
    assert kept is not None
    assert len(kept.alphas) == 1
    assert process.kept.state.summary() == "coder@1, poet@2, no gone; aliases poet@good; splits of ab"
    assert run(process.store.load("gone", "a")).version == 2


def test_the_weights_are_those_of_then_though_their_folder_has_changed(
    start: Start, device: DeviceThread, model: SharedModel, root: Path
) -> None:
    shutil.copytree(root / "a", root / "changing", dirs_exist_ok=True)
    process = start()
    digest = run(process.store.load("poet", "changing")).digest
    shutil.rmtree(root / "changing")
    (card,) = start().table.cards()
    assert (card.digest, card.version) == (digest, 1)


def test_a_version_that_only_a_split_keeps_in_memory_is_kept(start: Start) -> None:
    process = start()
    run(process.store.load("poet", "a"))
    run(process.store.set_splits({"ab": {"poet@1": 1.0}}))
    for _ in range(10):
        run(process.store.load("poet", "b"))
    before = process.state()
    assert len(before["versions"]) == 9
    assert start().state() == before


def test_weights_that_are_not_those_that_were_stored_are_refused(start: Start, tmp_path: Path) -> None:
    process = start()
    for path in "ab":
        run(process.store.load("poet", path))
    first, second = sorted((tmp_path / "serving" / "adapters").iterdir())
    shutil.rmtree(first)
    shutil.copytree(second, first)
    with pytest.raises(CheckpointError, match="poet@1 is not what was stored"):
        start()


def test_weights_that_nothing_names_any_more_are_removed(start: Start, tmp_path: Path) -> None:
    process = start()
    for _ in range(12):
        run(process.store.load("poet", "a"))
    assert len(list((tmp_path / "serving" / "adapters").iterdir())) == 8
    run(process.store.unload("poet"))
    assert list((tmp_path / "serving" / "adapters").iterdir()) == []


class Killed(Exception):
    """The end of the process."""


class Disk:
    """Counts what is done to it, and does no more than it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception = Killed()
        self.num_left = 10**6
        self._write_text = Path.write_text
        for owner, name in (
            (os, "fsync"),
            (Path, "replace"),
            (Path, "write_text"),
            (Path, "mkdir"),
            (shutil, "rmtree"),
            (serving_state, "write_exactly"),
        ):
            monkeypatch.setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.num_left -= 1
            if self.num_left >= 0:
                return function(*arguments, **options)
            if function is self._write_text:
                path, text = arguments
                function(path, text[: len(text) // 2], **options)
            if options.get("ignore_errors") and isinstance(self.error, OSError):
                return function(*arguments, **options)  # full disks let files go
            raise self.error

        return counted

    def unlimited(self) -> None:
        self.num_left = 10**6


Act = Callable[[Process], Awaitable[Any]]
ACTS: Mapping[str, Act] = {
    "load": lambda process: process.store.load("poet", "b"),
    "promote": lambda process: process.store.promote("poet", 1),
    "alias": lambda process: process.store.set_alias("good", "coder", 1),
    "unload": lambda process: process.store.unload("coder"),
    "split": lambda process: process.store.set_splits({"ab": {"poet@1": 1.0}}),
}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def with_two_names(start: Start) -> Process:
    process = start()
    run(process.store.load("poet", "a"))
    run(process.store.load("poet", "c"))
    run(process.store.load("coder", "a"))
    return process


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_process_that_is_killed_anywhere_in_a_change_leaves_the_state_before_it_or_after_it(
    start: Start, disk: Disk, tmp_path: Path, act: Act
) -> None:
    before = with_two_names(start).state()
    shutil.copytree(tmp_path / "serving", tmp_path / "before")
    found = []
    for place in range(100):
        shutil.rmtree(tmp_path / "serving")
        shutil.copytree(tmp_path / "before", tmp_path / "serving")
        process = start()
        disk.num_left = place
        try:
            run(act(process))
            break
        except Killed:
            disk.unlimited()
            found.append(start().state())
    disk.unlimited()
    after = process.state()
    assert before != after
    assert start().state() == after
    assert found[0] == before
    assert all(one in (before, after) for one in found)
    assert len(found) >= 4


def test_a_power_failure_finds_the_weights_before_the_state_that_names_them(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    sync, replace = format.sync, Path.replace

    def synced(path: Path) -> None:
        done.append(("sync", path.name))
        sync(path)

    def replaced(path: Path, target: Path) -> Path:
        done.append(("replace", target.name))
        return replace(path, target)

    for module in (format, serving_state):
        monkeypatch.setattr(module, "sync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    run(start().store.load("poet", "a"))
    (weights,) = (tmp_path / "serving" / "adapters").iterdir()
    assert set(done[:3]) == {("sync", "adapter_config.json"), ("sync", "adapters.safetensors"), ("sync", weights.name)}
    assert done[3:] == [("sync", "adapters"), ("sync", f"{STATE}.tmp"), ("replace", STATE), ("sync", "serving")]


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_change_that_the_disk_refuses_changes_nothing_and_can_be_made_when_there_is_room(
    start: Start, disk: Disk, act: Act
) -> None:
    process = with_two_names(start)
    before, said = process.state(), set()
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    for place in range(100):
        disk.num_left = place
        try:
            run(act(process))
            break
        except NotStored as error:
            disk.unlimited()
            said.add(str(error))
            assert process.state() == before
            assert len(list((process.folder.folder / "adapters").iterdir())) == 3
    disk.unlimited()
    assert place >= 3
    (text,) = said
    assert "serving does not take what operators set (No space left on device); make room" in text
    after = process.state()
    assert start().state() == after != before


def test_a_read_only_disk_serves_on_and_takes_no_change(start: Start, disk: Disk, tmp_path: Path) -> None:
    disk.error, disk.num_left = OSError(errno.EROFS, "Read-only file system"), 0
    process = start()
    with pytest.raises(
        NotStored, match=r"Read-only file system\); make room for it, or start with server.state=FOLDER"
    ):
        run(process.store.load("poet", "a"))
    assert process.table.cards() == ()


def test_a_disk_that_has_become_read_only_still_has_what_was_set(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = with_two_names(start).state()

    def refuse(folder: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    start().kept.close()
    monkeypatch.setattr(serving_state, "FolderLock", refuse)
    process = start()
    assert process.state() == before
    assert "restored, and changes will be refused: [Errno 30] Read-only file system" in caplog.text
    with pytest.raises(NotStored, match="Read-only file system"):
        run(process.store.promote("poet", 1))


def test_a_second_process_is_refused_changes_and_goes_on_with_them_when_it_begins_after_the_first(
    device: DeviceThread, model: SharedModel, root: Path, tmp_path: Path
) -> None:
    make = partial(Process, device, model, tmp_path / "serving", root, {})
    first, second = make(), make()
    run(first.store.load("poet", "a"))
    in_use = (
        rf"serving is in use by process {os.getpid()}, which keeps there what operators set; ask that one, or start"
    )
    with pytest.raises(FolderInUse, match=in_use):
        run(second.store.load("poet", "b"))
    with pytest.raises(FolderInUse, match=in_use):
        make()
    assert second.table.cards() == ()
    first.kept.close()
    with pytest.raises(FolderInUse, match="holds what operators have set in another process since this one began"):
        run(second.store.load("poet", "b"))
    third = make()
    assert third.state() == first.state()
    run(third.store.load("poet", "b"))
    third.kept.close()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (STATE, b"{", "cannot be read from"),
        (STATE, b"[" * 100_000, "cannot be read from"),
        (STATE, b'{"format": 2}', "cannot be read from"),
        ("adapters/*/*.safetensors", b"", "cannot be read from"),
    ],
)
def test_a_damaged_state_is_named_with_the_way_out(
    start: Start, root: Path, tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    run(start().store.load("poet", "a"))
    (path,) = (tmp_path / "serving").glob(file)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{message}.*server.state=FOLDER, or go without by server.state=off"):
        start()


def test_a_state_of_another_base_is_refused(start: Start, tmp_path: Path) -> None:
    run(start().store.load("poet", "a"))
    state = json.loads((tmp_path / "serving" / STATE).read_text())
    (tmp_path / "serving" / STATE).write_text(json.dumps(state | {"base_sha256": "ab" * 32}))
    with pytest.raises(CheckpointError, match="is about the base with the sha256 abababababab, this one has"):
        start()


def test_what_operators_name_of_a_policy_in_training_is_kept_and_nothing_else_of_it(
    start: Start, model: SharedModel, tmp_path: Path
) -> None:
    process = start(policy=3)
    run(process.store.set_alias("stable", "policy", 3))
    process.table.publish(adapter_of(model, "policy", 4))
    run(process.store.set_splits({"ab": {"policy@4": 0.5, "policy": 0.5}}))
    process.table.publish(adapter_of(model, "policy", 5))
    process.table.publish(adapter_of(model, "policy", 6))
    process.table.set_alias("best", 6)  # by an evaluation
    run(process.store.promote("policy", 5))
    assert sorted(path.name[:8] for path in (tmp_path / "serving" / "adapters").iterdir()) == [
        "policy@3",
        "policy@4",
        "policy@5",
    ]
    after = start(policy=6)
    assert [(card.version, card.is_served) for card in after.table.cards()] == [
        (6, False),
        (5, True),
        (4, False),
        (3, False),
    ]
    assert after.table.aliases == {"stable": ("policy", 3)}
    assert start(policy=7).table.resolve("policy").version == 5  # type: ignore[union-attr]


def test_a_policy_that_was_rolled_back_to_the_base_means_the_base(start: Start) -> None:
    process = start(policy=3)
    assert run(process.store.roll_back("policy")) == 0
    for newest in (3, 4):
        later = start(policy=newest)
        assert later.table.resolve("policy") is None
        assert later.kept.state.summary() == "policy@0"


def test_a_promotion_of_the_newest_version_ends_with_the_next(start: Start, model: SharedModel) -> None:
    process = start(policy=3)
    run(process.store.roll_back("policy"))
    run(process.store.promote("policy", 3))
    assert start(policy=2).table.resolve("policy").version == 3  # type: ignore[union-attr]  # its checkpoint was lost
    later = start(policy=4)
    assert later.table.resolve("policy").version == 4  # type: ignore[union-attr]
    assert later.kept.state.summary() == ""
    later.table.publish(adapter_of(model, "policy", 5))
    run(later.store.set_alias("other", "policy", 5))
    assert start(policy=5).kept.state.pinned("policy") == 5
    assert start(policy=5).kept.state.promoted == {}


def test_a_change_that_a_trainer_makes_impossible_in_the_meantime_is_not_kept(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start()
    run(process.store.load("poet", "a"))
    before = process.state()
    commit = ServingFolder.commit

    def and_unload(folder: ServingFolder, state: Any) -> None:
        commit(folder, state)
        monkeypatch.setattr(ServingFolder, "commit", commit)
        process.table.restore([], served={"poet": 1}, aliases={}, held=[], highest={"poet": 5})

    monkeypatch.setattr(ServingFolder, "commit", and_unload)
    with pytest.raises(AdapterError, match="poet is at version 5"):
        run(process.store.load("poet", "b"))
    assert process.kept.state.digests.keys() == {("poet", 1)}
    assert start().state()["versions"] == before["versions"]


def test_a_real_kill_frees_the_state_for_the_next_process(start: Start, root: Path, tmp_path: Path) -> None:
    run(start().store.load("poet", "a"))
    before = start().state()
    start().kept.close()
    lock = "from parallm.checkpoint.folder_lock import FolderLock; from pathlib import Path; import sys, time; "
    script = lock + "l = FolderLock(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script, str(tmp_path / "serving")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(FolderInUse, match=f"process {process.pid}"):
            start()
        process.kill()
    assert start().state() == before
