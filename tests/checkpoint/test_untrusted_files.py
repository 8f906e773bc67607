import io
import json
import os
import pickle
import socket
import struct
import zipfile
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from parallm.checkpoint.untrusted_files import check_folder, check_safetensors, resolve_inside, unpack
from parallm.errors import AdapterError, AdapterMissing

CONFIG = b'{"peft_type": "LORA", "r": 2, "lora_alpha": 4}'


def safetensors(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = safetensors({"a": tensor(0, 8, [2]), "__metadata__": {"x": "y"}, "b": tensor(8, 12, [2], "BF16")}, bytes(12))


def archive(*members: tuple[str, bytes], edit: Callable[[zipfile.ZipInfo], None] = lambda _: None) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in members:
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            edit(info)
            opened.writestr(info, content)
    return packed.getvalue()


def test_whole_safetensors_of_floating_point_tensors_pass() -> None:
    check_safetensors(io.BytesIO(GOOD), len(GOOD))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no whole safetensors"),
        (pickle.dumps({"a": 1}), "no whole safetensors"),
        (struct.pack("<Q", 2**63), "no whole safetensors"),
        (safetensors(b"{", b""), "is no JSON"),
        (safetensors(b"[" * 100_000, b""), "is no JSON"),
        (safetensors([], b""), "is no JSON object"),
        (safetensors({"a": tensor(0, 8, [2])}, bytes(4)), "more or fewer bytes"),
        (safetensors({"a": tensor(0, 8, [3])}, bytes(8)), "is not where"),
        (safetensors({"a": tensor(4, 12, [2])}, bytes(12)), "is not where"),
        (safetensors({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, bytes(12)), "is not where"),
        (safetensors({"a": tensor(0, 8, [2], "U8")}, bytes(8)), "of type U8"),
        (safetensors({"a": tensor(0, -8, [-2])}, b""), "no number"),
        (safetensors({"a": tensor(0, 8, [2.0])}, bytes(8)), "no number"),
        (safetensors({"a": {"dtype": "F32"}}, b""), "no whole description"),
        (safetensors({"a": tensor(0, 8, [2]) | {"dtype": ["F32"]}}, bytes(8)), r"of type \['F32'\]"),
        (safetensors({"a": tensor(0, 8, [2]) | {"dtype": {}}}, bytes(8)), r"of type \{\}; adapters have F32"),
        (safetensors({"a": tensor(0, 0, [0, *[10**400] * 3])}, b""), "or too many of them"),
        (safetensors({"a": tensor(0, 4, [1] * 5)}, bytes(4)), "or too many of them"),
        (
            safetensors({f"t{place}": tensor(0, 0, [0]) for place in range(16_385)}, b""),
            "16385 tensors, the limit is 16384",
        ),
        (safetensors(b" " * 5_000_000 + b"{}", b""), "5000002 bytes, the limit is 4194304"),
        (safetensors({"a": 7}, b""), "no whole description"),
    ],
)
def test_weights_that_are_not_what_they_say_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        check_safetensors(io.BytesIO(content), len(content))


def test_an_archive_of_the_two_files_is_unpacked(tmp_path: Path) -> None:
    unpack(archive(("adapter_config.json", CONFIG), ("adapter_model.safetensors", GOOD)), tmp_path, 1000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    check_folder(tmp_path, tmp_path, 1000)
    with pytest.raises(AdapterError, match="the limit is 50"):
        check_folder(tmp_path, tmp_path, 50)


@pytest.mark.parametrize("folder", ["lora", "checkpoints/run/adapter"])
def test_an_archive_of_a_folder_is_unpacked_as_that_folder(tmp_path: Path, folder: str) -> None:
    members = (
        (f"{folder}/", b""),
        (f"{folder}/adapter_config.json", CONFIG),
        (f"{folder}/README.md", b"# A card"),
        (f"__MACOSX/{folder}/._adapter_config.json", b"?"),
        (f"{folder}/.DS_Store", b"?"),
        (f"{folder}/adapter_model.safetensors", GOOD),
    )
    unpack(archive(*members), tmp_path, 1000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "adapter_config.json": CONFIG,
        "adapter_model.safetensors": GOOD,
    }


def as_link(info: zipfile.ZipInfo) -> None:
    info.external_attr = 0o120777 << 16


WEIGHTS = ("adapter_model.safetensors", GOOD)
SETTINGS = ("adapter_config.json", CONFIG)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 and nothing else", "no zip archive"),
        (archive(SETTINGS, ("../adapter_model.safetensors", GOOD)), "holds '../adapter_model"),
        (archive(SETTINGS, ("/etc/adapter_model.safetensors", GOOD)), "holds '/etc"),
        (archive(SETTINGS, ("a/adapter_model.safetensors", GOOD)), "holds 'a/"),
        (archive(("../adapter_config.json", CONFIG), ("../adapter_model.safetensors", GOOD)), "holds '../"),
        (archive(SETTINGS, ("adapter_model.bin", pickle.dumps({}))), "holds 'adapter_model.bin'"),
        (archive(SETTINGS), "each once"),
        (archive(("adapters.safetensors", GOOD), WEIGHTS), "each once"),
        (archive(SETTINGS, WEIGHTS, edit=as_link), "no ordinary file"),
        (archive(SETTINGS, ("adapter_model.safetensors", bytes(2000))), "has 2000 bytes, the limit is 1000"),
        (archive(("adapter_config.json", bytes(2_000_000)), WEIGHTS), "the limit is 1048576"),
    ],
)
def test_archives_with_tricks_are_refused_and_nothing_is_written(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        unpack(content, tmp_path, 1000)
    assert list(tmp_path.iterdir()) == []


def test_zeros_are_refused_by_their_first_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = archive(SETTINGS, ("adapter_model.safetensors", bytes(50_000_000)))
    monkeypatch.setattr("shutil.copyfileobj", lambda *_: pytest.fail("unpacked"))
    with pytest.raises(AdapterError, match="the header of the weights is no JSON"):
        unpack(zeros, tmp_path, 100_000_000)
    with pytest.raises(AdapterError, match=r"r in adapter_config\.json is 0"):
        unpack(archive(("adapter_config.json", CONFIG.replace(b"2", b"0")), WEIGHTS), tmp_path, 1000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
def test_what_is_no_ordinary_file_is_refused_and_never_waited_for(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(CONFIG)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    root = tmp_path
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as door, chdir(tmp_path):  # paths of sockets are short
            door.bind(name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
        root = Path("/")
    else:
        path.mkdir()
    with pytest.raises(AdapterError, match=f"{name} is no ordinary file"):
        check_folder(tmp_path, root, 1000)


def test_an_archive_that_understates_a_size_is_refused(tmp_path: Path) -> None:
    weights = safetensors({"a": tensor(0, 500_000, [125_000])}, bytes(500_000))
    bomb = bytearray(archive(SETTINGS, ("adapter_model.safetensors", weights)))
    assert bomb.count(struct.pack("<I", len(weights))) == 2
    with pytest.raises(AdapterError, match=r"no zip archive that can be read|more or fewer bytes"):
        unpack(bytes(bomb.replace(struct.pack("<I", len(weights)), struct.pack("<I", 900))), tmp_path, 1000)


def test_paths_must_stay_in_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "run").mkdir(parents=True)
    outside.mkdir()
    (root / "link").symlink_to(outside)
    assert resolve_inside(root, "run") == resolve_inside(root, str(root / "run")) == (root / "run").resolve()
    for path in ("../outside", str(outside), "link", "run/../../outside", "/etc"):
        with pytest.raises(AdapterError, match="is outside of"):
            resolve_inside(root, path)
    for path in ("nothing", "run\0", "a" * 5000):
        with pytest.raises(AdapterMissing, match="is not there"):
            resolve_inside(root, path)


def test_a_file_that_is_a_link_out_of_the_root_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_bytes(GOOD)
    (root / "adapter_model.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(AdapterError, match="is outside of"):
        check_folder(root, root, 1000)


def test_weights_that_were_cut_off_are_named_by_their_file(tmp_path: Path) -> None:
    whole = safetensors({"a.lora_a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8))
    (tmp_path / "adapters.safetensors").write_bytes(whole[:-4])
    with pytest.raises(AdapterError, match=r"adapters\.safetensors: the weights have more or fewer bytes"):
        check_folder(tmp_path, tmp_path, 1000)
