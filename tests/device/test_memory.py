import os
import resource
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from parallm.device.memory import give_back_memory, keep_freed_memory, wire_memory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere freed blocks go back by themselves")
def test_freed_memory_between_blocks_in_use_goes_back_to_the_system() -> None:
    blocks = [bytes(40_000) for _ in range(5_000)]
    top = bytes(40_000)  # above all of them, so that the heap cannot shrink from its end
    give_back_memory()
    before = resident_bytes()
    blocks.clear()
    give_back_memory()
    assert before - resident_bytes() > 100_000_000
    assert top


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_a_freed_block_stays_for_the_next_one_of_its_size() -> None:
    keep_freed_memory()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        assert len(b"x" * 10_000_000) == 10_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 5_000  # the system gives 50,000 pages anew


@pytest.mark.parametrize(("info", "limits"), [({"max_recommended_working_set_size": 7}, [7]), ({}, [])])
def test_memory_is_wired_where_the_system_recommends_how_much(
    info: dict[str, int], limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", asked.append)
    wire_memory()
    assert asked == limits
