"""Damaged GGUF files: each is refused with a clear error, or is still a model, within the memory of its own size.

The mutants are made from nano with packed weights, with its tokenizer whole and in llama.cpp's keys.
"""

import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from parallm.errors import ModelError
from parallm.model.gguf.file import read_gguf
from parallm.model.gguf.folder import describe
from parallm.model.gguf.parts import part_paths, read_parts
from parallm.model.load import find_folder, load_base

NUM_MUTANTS, NUM_IN_FIGURES = 300, 5000
EXTREMES = (0, 1, 2, 7, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
WEIGHTS_GROW = 12
"""How many bytes a byte of 4-bit weights may take in float32, with what is made of it on the way."""
Write = Callable[..., Path]


def mutants(content: bytes, header: int, count: int, seed: int) -> Iterator[bytes]:
    """Copies of a file with damages of many kinds, most of them in its first `header` bytes."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        changed = bytearray(content)
        at, size = int(random.integers(0, header)), int(random.integers(1, 64))
        match random.integers(0, 8):
            case 0:
                del changed[int(random.integers(0, len(content))) :]
            case 1:
                del changed[at:]
            case 2:
                for place in random.integers(0, header, random.integers(1, 8)):
                    changed[place] ^= 1 << int(random.integers(0, 8))
            case 3:
                changed[at : at + 8] = EXTREMES[random.integers(len(EXTREMES))].to_bytes(8, "little")
            case 4:
                changed[at : at + 4] = (EXTREMES[random.integers(8)] & 0xFFFFFFFF).to_bytes(4, "little")
            case 5:
                del changed[at : at + size]
            case 6:
                changed[at:at] = changed[at : at + size]
            case _:
                changed[at : at + size] = random.bytes(size)
        yield bytes(changed)


def outcome(path: Path, limit: int) -> str:
    """`refused` or `loaded`. Whatever else happens fails the test."""
    tracemalloc.start()
    reason = refusal(path, lambda: describe(read_gguf(path)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= limit, f"{peak:,} bytes to read {path.stat().st_size:,}"
    if reason:
        return "refused"
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    if refusal(path, lambda: compute(path)):
        return "refused"
    assert mx.get_peak_memory() - before <= WEIGHTS_GROW * limit
    return "loaded"


def refusal(path: Path, read: Callable[[], object], other: Path | None = None) -> str | None:
    """What a ModelError says, which names the file, or the other part of its model."""
    try:
        read()
    except ModelError as error:
        reason = str(error)
    else:
        return None
    assert str(path) in reason or str(other) in reason
    return reason


def compute(path: Path) -> None:
    base, _ = load_base(find_folder(str(path)), str(path))
    mx.eval(base(mx.array([[5, 17, 9]])))


@pytest.fixture
def sources(write_llama: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def with_keys(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("tokenizer.huggingface.json")
        writer.kv_data[0].pop("tokenizer.ggml.pre")
        writer.add_tokenizer_pre("gpt-2")
        tokens = set(writer.kv_data[0]["tokenizer.ggml.tokens"].value)
        pairs = [(token[:1], token[1:]) for token in sorted(tokens) if {token[:1], token[1:]} <= tokens]
        writer.add_token_merges([" ".join(pair) for pair in pairs])

    kind = GGMLQuantizationType.Q4_0
    return [write_llama(name="whole.gguf", kind=kind), write_llama(name="keys.gguf", kind=kind, change=with_keys)]


def try_mutants(sources: list[Path], count: int, folder: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed, source in enumerate(sources):
        content = source.read_bytes()
        for number, mutant in enumerate(mutants(content, start_of_data(source), count // 2, seed)):
            path = folder / f"{seed}-{number}.gguf"
            path.write_bytes(mutant)
            found[outcome(path, len(content))] += 1
            path.unlink()
    return found


def start_of_data(path: Path) -> int:
    return int(gguf.GGUFReader(path).data_offset)


def test_the_files_that_are_damaged_are_whole(sources: list[Path]) -> None:
    for path in sources:
        assert outcome(path, path.stat().st_size) == "loaded"


def test_damaged_files_are_refused_or_are_models(sources: list[Path], tmp_path: Path) -> None:
    found = try_mutants(sources, NUM_MUTANTS, tmp_path)
    assert found["refused"] > NUM_MUTANTS / 2
    assert found["loaded"] >= 1, "some damages change a text alone"


def test_damages_of_a_later_part_are_refused_or_are_models(write_llama: Write, tmp_path: Path) -> None:
    first = write_llama(kind=GGMLQuantizationType.Q4_0, tensors_of_part=20)
    second = part_paths(first)[1]
    content, start, found = second.read_bytes(), start_of_data(second), Counter[str]()
    for mutant in mutants(content, start, 100, 0):
        second.write_bytes(mutant)
        reason = refusal(second, lambda: describe(read_parts(first)), first)
        found["refused" if reason or refusal(second, lambda: compute(first), first) else "loaded"] += 1
    assert found["refused"] > 50
    second.write_bytes(content)
    compute(first)


@pytest.mark.robustness
def test_thousands_of_damaged_files(
    sources: list[Path], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found = try_mutants(sources, NUM_IN_FIGURES, tmp_path)
    record_property("gguf.mutants_survived", found.total())
    record_property("gguf.mutants_refused", found["refused"])
    record_property("remark", f"{found['refused']} refused, {found['loaded']} are still models")


def test_a_reader_that_believes_the_file_does_worse(
    sources: list[Path], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    unclear = 0
    for number, mutant in enumerate(mutants(sources[0].read_bytes(), start_of_data(sources[0]), 100, 0)):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(mutant)
        try:
            gguf.GGUFReader(path)
        except (IndexError, OverflowError, UnicodeDecodeError, MemoryError, TypeError, KeyError):
            unclear += 1
        except ValueError:
            pass
    assert unclear > 10
    record_property("gguf.control_unclear_errors", unclear)
