"""The catalogue: what it finds, what its names mean, how fast it lists, and that no kill breaks it."""

import asyncio
import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallm.errors import ConfigError, InvalidRequest, UnknownModel
from parallm.model.load import NANO
from parallm.registry import discovery
from parallm.registry.catalogue import FILE, OWN_MODELS, Catalogue
from parallm.registry.discovery import describe
from parallm.registry.records import Overlay, normal_name
from tests.registry.folders import TEMPLATE, on_loop, write_folder


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_folder(tmp_path / "models" / "Acme" / "Chat", template=TEMPLATE)
    write_folder(tmp_path / "models" / "coder", quantization={"bits": 4})
    return tmp_path / "models"


@pytest.fixture
def catalogue(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalogue]:
    monkeypatch.setattr(discovery, "HF_HUB_CACHE", str(tmp_path / "hub"))
    made = Catalogue(tmp_path / "registry", (str(models),))
    yield made
    made.close()


async def names_of(catalogue: Catalogue) -> list[str]:
    return [named.name for named in await catalogue.names()]


@on_loop
async def test_a_scan_names_what_is_new_and_notes_what_is_gone(catalogue: Catalogue, models: Path) -> None:
    assert await catalogue.scan() == ("Acme/Chat:latest", "coder:latest")
    assert await catalogue.scan() == ()
    shutil.rmtree(models / "coder")
    write_folder(models / "later")
    assert await catalogue.scan() == ("later:latest",)
    missing = {named.name: named.model.is_missing for named in await catalogue.names()}
    assert missing == {"Acme/Chat:latest": False, "coder:latest": True, "later:latest": False}


@on_loop
async def test_a_model_is_described_by_its_files(catalogue: Catalogue) -> None:
    await catalogue.scan()
    chat, coder = await catalogue.find("acme/chat"), await catalogue.find("CODER:latest")
    assert chat.model.capabilities == ("completion", "tools", "thinking")
    assert (coder.model.capabilities, coder.model.quantization) == (("completion",), "4-bit")
    assert (chat.model.architecture, chat.model.context, chat.model.parameters) == ("llama", 128, 256)


def test_the_parameters_of_the_embedded_model_are_counted() -> None:
    model = describe("nano", NANO, "")
    assert model.parameters is not None
    assert model.num_bytes > 4 * model.parameters > 0.95 * model.num_bytes - 100_000
    assert model.capabilities == ("completion",)


@on_loop
async def test_models_of_the_hub_cache_are_found_by_their_ids(catalogue: Catalogue, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--acme--tiny"
    real = write_folder(tmp_path / "elsewhere")
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir()
    for file in real.iterdir():  # as the cache links to its blobs
        (repository / "snapshots" / "abc" / file.name).symlink_to(file)
    assert "acme/tiny:latest" in await catalogue.scan()
    (repository / "refs" / "main").write_text("def")  # a new revision keeps the name
    shutil.copytree(repository / "snapshots" / "abc", repository / "snapshots" / "def")
    assert await catalogue.scan() == ()
    assert (await catalogue.find("acme/tiny")).model.folder.endswith("def")


@on_loop
async def test_equal_names_of_two_models_get_a_number(catalogue: Catalogue, tmp_path: Path) -> None:
    write_folder(tmp_path / "others" / "coder")
    both = Catalogue(tmp_path / "second", (str(tmp_path / "models"), str(tmp_path / "others")))
    try:
        assert await both.scan() == ("Acme/Chat:latest", "coder:latest", "coder-2:latest")
    finally:
        both.close()


@on_loop
async def test_names_are_copied_and_deleted_and_stay_so(catalogue: Catalogue) -> None:
    await catalogue.scan()
    await catalogue.copy("coder", "team/coder:v1")
    await catalogue.delete("coder")
    await catalogue.scan()
    assert await names_of(catalogue) == ["Acme/Chat:latest", "team/coder:v1"]
    with pytest.raises(UnknownModel, match="Acme/Chat:latest"):
        await catalogue.find("acme/chatt")


@on_loop
async def test_a_name_with_an_overlay_keeps_it(catalogue: Catalogue, models: Path) -> None:
    await catalogue.scan()
    overlay = Overlay(system="Rhyme.", parameters={"temperature": 0}, messages=({"role": "user", "content": "hi"},))
    await catalogue.create("poet", "coder", overlay)
    await catalogue.copy("poet", "bard")
    assert (await catalogue.find("bard")).overlay == overlay
    await catalogue.create("second", str(models / "coder"))
    assert (await catalogue.find("second")).key == (await catalogue.find("poet")).key
    await catalogue.create("tuned", "poet", replace(overlay, adapter="/adapter"))
    assert (await catalogue.find("tuned")).key != (await catalogue.find("poet")).key


@on_loop
async def test_only_models_that_were_created_here_lose_their_files(catalogue: Catalogue, models: Path) -> None:
    await catalogue.scan()
    own = write_folder(catalogue.folder / OWN_MODELS / "mine")
    await catalogue.create("mine", str(own))
    await catalogue.copy("mine", "other")
    await catalogue.delete("mine")
    assert own.is_dir()
    await catalogue.delete("other")
    await catalogue.delete("coder")
    assert not own.exists()
    assert (models / "coder").is_dir()


@on_loop
async def test_the_newest_loads_are_kept(catalogue: Catalogue) -> None:
    await catalogue.scan()
    model = (await catalogue.find("coder")).model
    assert await catalogue.loaded_bytes(model) is None
    for number in range(20):
        await catalogue.note_load(model, 0.5, num_bytes=1000 + number)
    await catalogue.note_load(model, 0.5, error="no memory")
    assert await catalogue.loaded_bytes(model) == 1019
    assert catalogue._connection.execute("SELECT count(*) FROM loads").fetchone() == (8,)


@pytest.mark.parametrize("text", ["", "a b", "a/b/c/d", "../etc", "-x", "a:b:c", "a@3", "a//b", "x" * 400])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="no name of a model"):
        normal_name(text)


@on_loop
async def test_the_file_is_the_owners_alone_and_a_newer_one_is_refused(catalogue: Catalogue) -> None:
    await catalogue.scan()
    for file in catalogue.folder.glob(f"{FILE}*"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    with sqlite3.connect(catalogue.folder / FILE) as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(ConfigError, match="newer ParaLLM"):
        Catalogue(catalogue.folder)


def test_a_broken_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(os.urandom(5000))
    with pytest.raises(ConfigError, match="move the file away"):
        Catalogue(tmp_path)


@on_loop
async def test_a_folder_that_cannot_be_read_is_left_out(catalogue: Catalogue, models: Path) -> None:
    write_folder(models / "broken")
    (models / "broken" / "model.safetensors").write_bytes(b"\xff" * 100)
    assert await catalogue.scan() == ("Acme/Chat:latest", "coder:latest")


def header(**tensor: object) -> bytes:
    text = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"[]"),
        ("config.json", b"[" * 100_000),
        ("config.json", b'{"text_config": 1}'),
        ("config.json", b'{"max_position_embeddings": "x"}'),
        ("config.json", b'{"max_position_embeddings": 1e400}'),
        ("config.json", b'{"hidden_size": [1]}'),
        ("config.json", b'{"vocab_size": 99999999999999999999}'),
        ("config.json", b'{"model_type": "\\ud800"}'),
        ("config.json", b"{}" + b" " * (17 << 20)),
        ("model.safetensors", header(dtype="F32")),
        ("model.safetensors", header(dtype="F32", shape=["a"])),
        ("model.safetensors", header(dtype="F32", shape=[1 << 62, 1 << 62])),
        ("model.safetensors", header(dtype="F32", shape=[-1])),
        ("model.gguf", b"GGUF"),
    ],
)
@on_loop
async def test_a_hostile_folder_is_left_out(catalogue: Catalogue, models: Path, name: str, content: bytes) -> None:
    (write_folder(models / "hostile") / name).write_bytes(content)
    if name.endswith(".gguf"):
        (models / "hostile" / "config.json").unlink()
    assert await catalogue.scan() == ("Acme/Chat:latest", "coder:latest")


@pytest.mark.parametrize("name", ["model-2.safetensors", "README.md", "tokenizer_config.json", "modules.json"])
@on_loop
async def test_a_pipe_among_the_files_of_a_model_does_not_stop_a_scan(
    catalogue: Catalogue, models: Path, name: str
) -> None:
    file = write_folder(models / "hostile") / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    found = await asyncio.wait_for(catalogue.scan(), 20)
    assert found == ("Acme/Chat:latest", "coder:latest", *(() if name.startswith("model-") else ("hostile:latest",)))


@on_loop
async def test_names_of_files_that_are_no_text_are_left_out(catalogue: Catalogue, models: Path, tmp_path: Path) -> None:
    write_folder(models / os.fsdecode(b"bad-\xff"))
    reference = tmp_path / "hub" / "models--acme--tiny" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    for content in (b"\xff", b"a\0b", b"../../../../models/coder"):
        reference.write_bytes(content)
        await catalogue.scan()
        assert await names_of(catalogue) == ["Acme/Chat:latest", "coder:latest"]


@on_loop
async def test_two_processes_may_change_one_catalogue(catalogue: Catalogue) -> None:
    other = Catalogue(catalogue.folder)
    try:
        await catalogue.scan()
        copies = (one.copy("coder", f"copy{number}") for number in range(10) for one in (catalogue, other))
        await asyncio.gather(*copies)
        assert len(await names_of(other)) == 12
    finally:
        other.close()


@on_loop
async def test_a_thousand_models_are_listed_in_50_ms(
    catalogue: Catalogue, record_property: Callable[[str, object], None]
) -> None:
    await catalogue.scan()
    model = (await catalogue.find("coder")).model
    with catalogue._transaction():
        for number in range(1000):
            one = replace(model, source=f"/models/{number}", folder=f"/models/{number}")
            catalogue._insert_name(f"name{number}:latest", catalogue._register(one), Overlay(system="x"))
    seconds, of_cpu = [], []
    for _ in range(5):
        began, began_of_cpu = time.perf_counter(), time.process_time()
        assert len(await catalogue.names()) == 1002
        seconds.append(time.perf_counter() - began)
        of_cpu.append(time.process_time() - began_of_cpu)
    record_property("models.list_ms", 1000 * min(seconds))
    assert min(of_cpu) < 0.05  # the wall's seconds are those of whatever else runs


def killed(folder: Path, *options: str) -> dict[str, Any]:
    program = Path(__file__).with_name("killed_catalogue.py")
    root = str(Path(__file__).parents[2])
    words = [sys.executable, str(program), str(folder), *options]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": root}, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_kills_at_fifty_points_leave_the_state_before_or_after_a_change(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    outcome = killed(tmp_path)
    record_property("models.catalogue_kills", outcome["kills"])
    record_property("models.catalogue_broken", len(outcome["wrong"]))
    assert (outcome["kills"], outcome["wrong"]) == (50, [])
    assert outcome["changes"] > 50


def test_a_change_that_is_lost_is_found(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    wrong = killed(tmp_path, "--forget")["wrong"]
    record_property("models.control_broken", len(wrong))
    assert wrong


def test_the_registry_loads_no_mlx() -> None:
    script = "import sys, parallm.registry.catalogue; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
