"""Models in several files: they are what the one file is, and what is not whole or not of one model is refused."""

from collections.abc import Callable
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest

from parallm.errors import ModelError
from parallm.model.gguf import file
from parallm.model.gguf.file import read_gguf
from parallm.model.gguf.parts import is_later_part, part_paths, read_parts, stem_of
from parallm.model.load import find_folder, load_base
from parallm.registry import discovery
from parallm.registry.discovery import describe, digest_of, find_models

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(discovery, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def parts(write_llama: Write) -> tuple[Path, ...]:
    return part_paths(write_llama(name="nano.gguf", tensors_of_part=10))


def logits(path: Path) -> mx.array:
    base, _ = load_base(find_folder(str(path)), str(path))
    return base(mx.array([[5, 17, 9]]))


def test_a_model_in_parts_computes_what_the_one_file_does(parts: tuple[Path, ...], write_llama: Write) -> None:
    assert len(parts) > 2
    assert mx.array_equal(logits(parts[0]), logits(write_llama(name="whole.gguf")))


def test_parts_are_found_beside_a_link_and_not_beside_what_it_leads_to(parts: tuple[Path, ...], tmp_path: Path) -> None:
    """As the hub's cache has them."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(parts):
        path.rename(tmp_path / "blobs" / str(number))
        (tmp_path / "snapshot" / path.name).symlink_to(tmp_path / "blobs" / str(number))
    assert logits(tmp_path / "snapshot" / parts[0].name).shape[:2] == (1, 3)


def test_a_catalogue_has_a_model_in_parts_once(parts: tuple[Path, ...]) -> None:
    found = list(find_models((str(parts[0].parent),)))
    assert [(model.name, model.folder) for model in found] == [("nano", parts[0])]
    digest = digest_of(parts[0])
    model = describe("nano", parts[0], digest)
    assert model.num_bytes == sum(path.stat().st_size for path in parts)
    parts[1].touch()
    assert digest_of(parts[0]) != digest


def test_names_tell_the_parts() -> None:
    path = Path("a/Big-00002-of-00003.GGUF")
    assert [one.name for one in part_paths(path)] == [f"Big-0000{number}-of-00003.GGUF" for number in (1, 2, 3)]
    assert (is_later_part(path), is_later_part(part_paths(path)[0]), stem_of(path)) == (True, False, "Big")
    for name in ("a.gguf", "a-1-of-2.gguf", "a-00004-of-00003.gguf", "a-00001-of-99999.gguf", "a-00000-of-00002.gguf"):
        assert part_paths(Path(name)) == (Path(name),)


def test_what_is_not_whole_says_what_is_missing(parts: tuple[Path, ...], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"later part of its model; name the first one, {parts[0].name}"):
        read_parts(parts[1])
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(parts[0].read_bytes())
    with pytest.raises(ModelError, match=rf"one of {len(parts)} parts, and its name does not tell.*NAME-00001-of-"):
        read_parts(renamed)
    content = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelError, match=rf"{parts[1].name}: it calls itself part 2 of {len(parts)}, and is 1 of"):
        read_parts(parts[0])
    parts[1].write_bytes(content[:-1000])
    with pytest.raises(ModelError, match=rf"{parts[1].name}: .*outside of the file; copy or download"):
        read_parts(parts[0])
    parts[1].unlink()
    with pytest.raises(ModelError, match=rf"{parts[1].name} is missing beside it, one of its {len(parts)} parts"):
        read_parts(parts[0])


@pytest.mark.parametrize(
    ("names", "total", "error"), [("ab", 3, "have 2 tensors, and should have 3"), ("aa", 2, "'a'")]
)
def test_parts_of_different_models_are_refused(names: str, total: int, error: str, tmp_path: Path) -> None:
    for number, name in enumerate(names):
        path = tmp_path / f"x-0000{number + 1}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", total)
        writer.add_tensor(name, np.zeros((4, 4), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    with pytest.raises(ModelError, match=error):
        read_parts(tmp_path / "x-00001-of-00002.gguf")


def test_a_header_without_end_is_not_read_to_its_end(write_llama: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_llama()
    read_gguf(path)
    monkeypatch.setattr(file, "MAX_HEADER_BYTES", 4096)
    with pytest.raises(ModelError, match=r"metadata goes on beyond 4,096 bytes"):
        read_gguf(path)
