import asyncio
import io
import json
import shutil
import tempfile
import zipfile
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import pytest

from parallm.checkpoint.adapter_store import AdapterStore
from parallm.checkpoint.persistent_table import PersistentTable
from parallm.device.governor import Governor
from parallm.device.thread import DeviceThread
from parallm.errors import AdapterError, AdapterMissing, UnknownModel
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.files import write_mlx, write_peft
from parallm.model.adapters.initial import initial_arrays, starting_adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.load import load_shared_model
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel

Make = Callable[..., AdapterStore]
Result = TypeVar("Result")


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceThread]:
    made = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def model(device: DeviceThread, tiny_model: Callable[[str], Path]) -> SharedModel:
    return device.call(partial(load_shared_model, ModelSettings(path=str(tiny_model("llama"))))).result(60)


@pytest.fixture(scope="module")
def folder(device: DeviceThread, model: SharedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with `mlx` and `peft`, the same adapter of rank 2 in both formats."""
    root = tmp_path_factory.mktemp("root")

    def write() -> None:
        arrays = initial_arrays(model.targets, 2, mx.random.key(1), ranks={})
        made = make_adapter({name: array + 0.25 for name, array in arrays.items()}, version=7, rank=2, alpha=4)
        write_mlx(made, root / "mlx", num_layers=model.num_layers)
        write_peft(made, root / "peft", "tiny", model_type="llama")

    device.call(write).result(60)
    return root


@pytest.fixture
def table() -> AdapterTable:
    return AdapterTable()


@pytest.fixture
def make_store(device: DeviceThread, model: SharedModel, table: AdapterTable, folder: Path) -> Make:
    start = device.call(partial(starting_adapter, ModelSettings(lora=LoraSettings(rank=2)), model, 0)).result(60)

    def make(*, trained: tuple[str, ...] = (), max_names: int = 8, root: str | None = str(folder)) -> AdapterStore:
        kept = PersistentTable(device, table, trained=trained)
        return AdapterStore(device, model, kept, root=root, max_bytes=10_000_000, max_names=max_names, start=start)

    return make


def run(work: Awaitable[Result]) -> Result:
    async def main() -> Result:
        return await work

    return asyncio.run(main())


def archive_of(folder: Path) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as opened:
        for path in folder.iterdir():
            opened.write(path, path.name)
    return packed.getvalue()


def served(table: AdapterTable, name: str) -> Adapter:
    found = table.resolve(name)
    assert found is not None
    return found


def test_a_folder_is_loaded_as_the_next_version_of_its_name_and_served(make_store: Make, table: AdapterTable) -> None:
    store = make_store()
    first, second = run(store.load("poet", "mlx")), run(store.load("poet", "peft"))
    assert [(card.version, card.is_served) for card in (first, second)] == [(1, True), (2, True)]
    assert first.digest == second.digest
    assert served(table, "poet").version == 2


def test_an_upload_is_the_same_adapter_as_its_folder(make_store: Make, table: AdapterTable, folder: Path) -> None:
    store = make_store(root=None)
    cards = [run(store.upload("poet", archive_of(folder / name))) for name in ("peft", "mlx")]
    assert cards[0].digest == cards[1].digest
    with pytest.raises(AdapterError, match=r"server\.adapters_root=FOLDER"):
        run(store.load("poet", "mlx"))


def test_raw_tensors_replace_those_of_the_served_version(make_store: Make, table: AdapterTable, tmp_path: Path) -> None:
    store = make_store()
    run(store.load("poet", "peft"))
    before = served(table, "poet")
    target = before.targets[0]
    tensor = mx.full(before.arrays[f"{target}.lora_a"].T.shape, 0.5)
    mx.save_safetensors(str(tmp_path / "w.safetensors"), {f"base_model.model.{target}.lora_A.weight": tensor})
    card = run(store.update("poet", (tmp_path / "w.safetensors").read_bytes()))
    after = served(table, "poet")
    assert (card.version, card.parent) == (2, 1)
    assert mx.array_equal(after.arrays[f"{target}.lora_a"], tensor.T).item()
    assert mx.array_equal(after.arrays[f"{target}.lora_b"], before.arrays[f"{target}.lora_b"]).item()
    mx.save_safetensors(str(tmp_path / "w.safetensors"), {f"{target}.lora_a": tensor})
    with pytest.raises(AdapterError, match="in poet@2 it has"):
        run(store.update("poet", (tmp_path / "w.safetensors").read_bytes()))


def test_tensors_alone_are_a_first_version_of_the_form_that_the_run_has(
    make_store: Make, table: AdapterTable, folder: Path
) -> None:
    store = make_store()
    (weights,) = (folder / "peft").glob("*.safetensors")
    card = run(store.update("policy", weights.read_bytes()))
    assert (card.version, card.rank, card.is_served) == (1, 2, True)
    run(store.load("whole", "peft"))
    whole = served(table, "whole").arrays
    assert all(mx.array_equal(array, whole[name]).item() for name, array in served(table, "policy").arrays.items())


def test_what_is_no_adapter_of_this_base_changes_nothing(make_store: Make, table: AdapterTable, folder: Path) -> None:
    store = make_store()
    (folder / "empty").mkdir(exist_ok=True)
    for path, error in (
        ("../", AdapterError),
        ("empty", AdapterError),
        ("nothing", AdapterMissing),
        ("0" * 4096, AdapterMissing),
        ("empty@" + "0" * 4000, AdapterError),
    ):
        with pytest.raises(error):
            run(store.load("poet", path))
    with pytest.raises(AdapterError, match="no zip archive"):
        run(store.upload("poet", b"no archive"))
    assert table.cards() == ()


@pytest.fixture
def changed(folder: Path, tmp_path: Path) -> Callable[..., bytes]:
    """The archive of an adapter with another config, or another first tensor: `changed("peft", lora_alpha=1e39)`."""

    def make(form: str, *, tensor: float | None = None, **config: object) -> bytes:
        copy = Path(shutil.copytree(folder / form, tmp_path / form, dirs_exist_ok=True))
        path = copy / "adapter_config.json"
        values = json.loads(path.read_text())
        values.get("lora_parameters", values).update(config)
        path.write_text(json.dumps(values))
        if tensor is not None:
            (weights,) = copy.glob("*.safetensors")
            arrays = dict(mx.load(str(weights)))
            first = min(arrays)
            mx.save_safetensors(str(weights), arrays | {first: mx.full(arrays[first].shape, tensor)})
        return archive_of(copy)

    return make


@pytest.mark.parametrize(
    ("form", "changes", "reason"),
    [
        ("mlx", {"scale": 1e39}, "times the adapter's largest scale 1e.39 is more than float32 and bfloat16 hold"),
        ("mlx", {"scale": 1e308}, "times the adapter's largest scale inf"),
        ("mlx", {"scale": float("inf")}, "Infinity is no number of JSON"),
        ("mlx", {"scale": -1}, r"lora_parameters\.scale in adapter_config\.json is -1"),
        ("peft", {"lora_alpha": 1e39}, "times the adapter's largest scale 5e.38"),
        ("peft", {"tensor": 3.3e38}, "times the adapter's largest scale 2"),
        ("peft", {"tensor": float("nan")}, "holds values that are not finite"),
        ("peft", {"alpha_pattern": {"q_proj": None}}, "alpha_pattern"),
        ("peft", {"alpha_pattern": {"q_proj": 1e39}}, "times the adapter's largest scale 5e.38"),
        ("peft", {"rank_pattern": {"(x?)?" * 50: 16}}, "is an expression that is not read here"),
        ("peft", {"rank_pattern": {"q_proj": 7}}, "rank 7 needs|expected"),
    ],
)
def test_an_upload_whose_numbers_mean_nothing_is_refused_and_nothing_published(
    form: str,
    changes: dict[str, object],
    reason: str,
    make_store: Make,
    table: AdapterTable,
    changed: Callable[..., bytes],
) -> None:
    with pytest.raises(AdapterError, match=reason) as caught:
        run(make_store().upload("poet", changed(form, **changes)))
    assert table.cards() == ()
    assert tempfile.gettempdir() not in str(caught.value)


def test_messages_name_no_folder_of_the_server(make_store: Make, folder: Path, changed: Callable[..., bytes]) -> None:
    (folder / "empty").mkdir(exist_ok=True)
    (folder / "broken").mkdir(exist_ok=True)
    (folder / "broken" / "adapter_config.json").write_text("{}")
    store = make_store()
    paths = ("", "empty", "nothing", "../x", "mlx@3", "broken", "peft/adapter_config.json", str(folder / "empty"))
    tries = [store.load("poet", path) for path in paths]
    tries += [
        store.upload("poet", content) for content in (b"no archive", changed("mlx", rank=3), changed("peft", r=3))
    ]
    for attempt in tries:
        with pytest.raises(AdapterError) as caught:
            run(attempt)
        assert str(folder) not in str(caught.value)
        assert tempfile.gettempdir() not in str(caught.value)


def test_raw_tensors_that_a_scale_makes_infinite_are_refused(
    make_store: Make, table: AdapterTable, tmp_path: Path
) -> None:
    store = make_store()
    run(store.load("poet", "peft"))
    before = served(table, "poet")
    target = before.targets[0]
    tensor = mx.full(before.arrays[f"{target}.lora_b"].T.shape, 3e38)
    mx.save_safetensors(str(tmp_path / "w.safetensors"), {f"base_model.model.{target}.lora_B.weight": tensor})
    with pytest.raises(AdapterError, match="times the adapter's largest scale 2"):
        run(store.update("poet", (tmp_path / "w.safetensors").read_bytes()))
    assert served(table, "poet").version == 1


@pytest.mark.parametrize("name", ["", "../x", "a b", "a\nb", "poet@1", "base", "latest", "best", "12", "x" * 200])
def test_names_that_could_mean_something_else_are_refused(make_store: Make, name: str) -> None:
    with pytest.raises(AdapterError, match="cannot be a name"):
        run(make_store().load(name, "peft"))


def test_a_name_in_training_is_the_trainers(make_store: Make, table: AdapterTable) -> None:
    store = make_store(trained=("policy",))
    with pytest.raises(AdapterError, match="policy is trained by this run, which makes its versions"):
        run(store.load("policy", "peft"))
    for _ in range(2):
        run(make_store().load("policy", "peft"))
    for version in (None, 2):
        with pytest.raises(AdapterError, match="goes on from its newest version"):
            run(store.unload("policy", version))
    run(store.roll_back("policy"))
    with pytest.raises(AdapterError, match="promote another version first"):
        run(store.unload("policy", 1))
    run(store.promote("policy", 2))
    run(store.unload("policy", 1))
    assert [card.version for card in table.cards()] == [2]


def test_the_number_of_names_is_bounded_and_unloading_makes_room(make_store: Make, table: AdapterTable) -> None:
    store = make_store(max_names=1)
    run(store.load("poet", "peft"))
    with pytest.raises(AdapterError, match=r"1 adapters are loaded.*server.max_adapters"):
        run(store.load("coder", "peft"))
    run(store.unload("poet"))
    assert run(store.load("coder", "peft")).version == 1
    with pytest.raises(UnknownModel):
        table.resolve("poet")


def test_aliases_are_set_and_removed(make_store: Make, table: AdapterTable) -> None:
    store = make_store()
    run(store.load("poet", "peft"))
    run(store.set_alias("good", "poet", 1))
    assert served(table, "poet@good").version == 1
    run(store.remove_alias("good", "poet"))
    with pytest.raises(AdapterError, match="cannot be an alias"):
        run(store.set_alias("a b", "poet", 1))
    with pytest.raises(AdapterError, match="best of policy is set by its evaluations"):
        run(make_store(trained=("policy",)).set_alias("best", "policy", 1))


def test_messages_stay_whole_where_the_root_is_the_present_folder(
    make_store: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "broken").mkdir(exist_ok=True)
    (folder / "broken" / "adapter_config.json").write_text("{}")
    with pytest.raises(
        AdapterError, match=r"the adapter in broken|adapter_config\.json lacks lora_parameters"
    ) as caught:
        run(make_store(root=".").load("poet", "broken"))
    assert "server.adapters_root" not in str(caught.value)


def test_an_archive_is_the_adapter_that_it_was_made_of(make_store: Make, table: AdapterTable) -> None:
    store = make_store()
    run(store.load("poet", "mlx"))
    run(store.load("poet", "peft"))
    card, content = run(store.archive("poet@1"))
    assert (card.name, card.version) == ("poet", 1)
    assert sorted(zipfile.ZipFile(io.BytesIO(content)).namelist()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    copy = run(store.upload("copy", content))
    assert copy.digest == card.digest
    run(store.set_alias("liked", "poet", 1))
    assert run(store.archive("poet@liked"))[0].version == 1
    assert run(store.archive("poet"))[0].version == 2
    with pytest.raises(UnknownModel):
        run(store.archive("poet@9"))
    with pytest.raises(AdapterError, match="is the base"):
        run(store.archive("base"))
