"""The adapters that a process is started with, beside what operators have left."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest
from omegaconf import OmegaConf

from parallm.checkpoint.adapter_store import AdapterStore
from parallm.checkpoint.persistent_table import PersistentTable
from parallm.config.schema import RunConfig, to_config
from parallm.device.governor import Governor
from parallm.device.thread import DeviceThread
from parallm.errors import AdapterError, ConfigError
from parallm.model.adapters.adapter import make_adapter
from parallm.model.adapters.files import write_mlx
from parallm.model.adapters.initial import initial_arrays, starting_adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.load import load_shared_model
from parallm.model.settings import ModelSettings
from parallm.model.shared_model import SharedModel
from parallm.run.operator_state import check_given, open_nets, open_table, restore
from parallm.server.settings import ServerSettings

Start = Callable[..., tuple[PersistentTable, list[str]]]


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceThread]:
    made = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def model(device: DeviceThread, tiny_model: Callable[[str], Path]) -> SharedModel:
    return device.call(partial(load_shared_model, ModelSettings(path=str(tiny_model("llama"))))).result(60)


@pytest.fixture(scope="module")
def adapter(device: DeviceThread, model: SharedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("adapter")

    def write() -> None:
        arrays = initial_arrays(model.targets, 2, mx.random.key(1), ranks={})
        write_mlx(make_adapter(arrays, version=7, rank=2, alpha=4), folder, num_layers=model.num_layers)

    device.call(write).result(60)
    return str(folder)


@pytest.fixture
def start(device: DeviceThread, model: SharedModel, tmp_path: Path) -> Iterator[Start]:
    """Begins a process after the one before it has ended; what it serves, and what it says."""
    begun: list[PersistentTable] = []

    def begin(*, state: str = "auto", continues: bool = True, **given: str) -> tuple[PersistentTable, list[str]]:
        for one in begun:
            one.close()
        settings = ServerSettings(state=state)
        kept = open_table(settings, tmp_path, device, model, AdapterTable(), trained=(), continues=continues)
        begun.append(kept)
        return kept, asyncio.run(restore(kept, store_of(device, model, kept), given, {}))

    yield begin
    for one in begun:
        one.close()


def store_of(device: DeviceThread, model: SharedModel, kept: PersistentTable) -> AdapterStore:
    start = device.call(partial(starting_adapter, ModelSettings(), model, 0)).result(60)
    return AdapterStore(device, model, kept, root=None, max_bytes=10**7, max_names=2, start=start)


def names(kept: PersistentTable) -> list[str]:
    return [f"{card.name}@{card.version}" for card in kept.table.cards()]


def test_adapters_are_served_from_the_start_by_their_names(start: Start, adapter: str, tmp_path: Path) -> None:
    kept, texts = start(poet=adapter, coder=adapter)
    assert names(kept) == ["coder@1", "poet@1"]
    assert texts == [f"poet@1 is {adapter}", f"coder@1 is {adapter}"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "where", "message"),
    [
        ("poet", "/nowhere", r"server.adapters.poet=/nowhere: /nowhere is neither an adapter, a checkpoint nor a run"),
        ("poet", "{}@12", r"holds a single adapter; leave out @12"),
    ],
)
def test_an_adapter_that_is_not_there_is_named_with_its_key(
    start: Start, adapter: str, name: str, where: str, message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        start(**{name: where.format(adapter)})


def test_more_adapters_than_may_be_loaded_are_refused(start: Start, adapter: str) -> None:
    with pytest.raises(AdapterError, match=r"server.adapters.c=.*2 adapters are loaded, the limit; .*max_adapters"):
        start(a=adapter, b=adapter, c=adapter)


@pytest.mark.parametrize("name", ["base", "latest", "best", "policy"])
def test_names_that_mean_something_else_are_refused_before_a_model_loads(name: str) -> None:
    with pytest.raises(ConfigError, match=f"server.adapters.{name}: {name} is .*; choose another name"):
        check_given({name: "a", "poet": "b"}, {"policy": "trained by this run"})
    check_given({"poet": "a"}, {"policy": "trained by this run"})


@pytest.mark.parametrize("name", ["12", "a@1", "a b", ""])
def test_names_that_no_request_could_say_are_refused_with_the_configuration(name: str) -> None:
    with pytest.raises(ConfigError, match="must match pattern"):
        to_config(OmegaConf.create({"server": {"adapters": {name: "a"}}}), RunConfig)


def test_what_operators_have_changed_counts_before_what_is_given(
    start: Start, adapter: str, device: DeviceThread, model: SharedModel
) -> None:
    kept, _ = start(poet=adapter, coder=adapter)
    store = store_of(device, model, kept)
    asyncio.run(store.set_alias("good", "poet", 1))
    asyncio.run(store.unload("coder"))
    after, texts = start(poet="/gone by now", coder=adapter, state="auto")
    assert names(after) == ["poet@1"]
    assert texts == [
        f"restored poet@1, no coder; aliases poet@good from {after.folder}",
        "poet is as operators have left it, not as server.adapters.poet=/gone by now",
        f"coder is as operators have left it, not as server.adapters.coder={adapter}",
    ]


def test_nothing_is_kept_or_restored_where_that_is_off(
    start: Start, adapter: str, device: DeviceThread, model: SharedModel, tmp_path: Path
) -> None:
    kept, _ = start(poet=adapter)
    asyncio.run(store_of(device, model, kept).unload("poet"))
    (folder,) = tmp_path.iterdir()
    before = sorted(path.name for path in folder.rglob("*"))
    off, texts = start(poet=adapter, state="off")
    assert (names(off), texts) == (["poet@1"], [f"poet@1 is {adapter}"])
    asyncio.run(store_of(device, model, off).set_alias("good", "poet", 1))
    assert sorted(path.name for path in folder.rglob("*") if path.name != "process.lock") == [
        name for name in before if name != "process.lock"
    ]


def test_another_folder_is_another_state(
    start: Start, adapter: str, device: DeviceThread, model: SharedModel, tmp_path: Path
) -> None:
    own = str(tmp_path / "own")
    kept, _ = start(poet=adapter, state=own)
    asyncio.run(store_of(device, model, kept).set_alias("good", "poet", 1))
    assert names(start()[0]) == []
    assert names(start(state=own)[0]) == ["poet@1"]


def test_a_run_that_begins_anew_sets_what_was_kept_aside(
    start: Start,
    adapter: str,
    device: DeviceThread,
    model: SharedModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept, _ = start(poet=adapter)
    asyncio.run(store_of(device, model, kept).set_alias("good", "poet", 1))
    anew, texts = start(continues=False)
    assert (names(anew), texts) == ([], [])
    (folder,) = tmp_path.iterdir()
    assert folder.name == f"aside_serving-{model.sha256[:12]}.0"
    assert "was set aside" in caplog.text


def test_policy_nets_lie_beside_the_state_and_are_set_aside_with_a_run_that_begins_anew(tmp_path: Path) -> None:
    settings, nets = ServerSettings(), tmp_path / "run" / "serving-nets"
    found = open_nets(settings, tmp_path / "run", continues=True)
    assert found is not None
    assert found.folder == nets
    nets.mkdir(parents=True)
    open_nets(settings, tmp_path / "run", continues=True)
    assert nets.is_dir()
    open_nets(settings, tmp_path / "run", continues=False)
    assert not nets.exists()
    elsewhere = open_nets(ServerSettings(state=str(tmp_path / "state")), tmp_path / "run", continues=False)
    assert elsewhere is not None
    assert elsewhere.folder == tmp_path / "state" / "nets"
    assert open_nets(ServerSettings(state="off"), tmp_path / "run", continues=True) is None
    assert open_nets(settings, None, continues=True) is None
