"""Limits of control groups, of a made-up /proc and /sys."""

from pathlib import Path

import mlx.core as mx
import pytest

from parallm.device import memory
from parallm.device.cgroup import MemoryLimit, memory_limits

UNLIMITED = 9223372036854771712
"""What version 1 says of a group without a limit."""
MIB = 2**20


def group(folder: Path, version: int, limit: object, used: int, dropped: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    prefix = "" if version == 2 else "total_"
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {dropped}\n")


def process_in(root: Path, *lines: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))
    return root


def test_version_2_counts_a_group_and_those_around_it(tmp_path: Path) -> None:
    root = process_in(tmp_path, "0::/system.slice/parallm.service")
    mount = root / "sys/fs/cgroup"
    group(mount / "system.slice/parallm.service", 2, "max", 90 * MIB)
    group(mount / "system.slice", 2, 512 * MIB, 300 * MIB, dropped=100 * MIB)
    assert memory_limits(root) == (MemoryLimit(512 * MIB, 200 * MIB),)
    assert memory_limits(root)[0].left == 312 * MIB


def test_a_container_sees_its_own_group_as_the_mount(tmp_path: Path) -> None:
    root = process_in(tmp_path, "0::/")
    group(root / "sys/fs/cgroup", 2, 100 * MIB, 200 * MIB)
    assert [limit.left for limit in memory_limits(root)] == [0]


def test_version_1_may_name_a_path_that_only_the_host_has(tmp_path: Path) -> None:
    root = process_in(tmp_path, "4:cpu,cpuacct:/docker/ab", "3:memory:/docker/ab", "0::/")
    group(root / "sys/fs/cgroup/memory", 1, 256 * MIB, 64 * MIB, dropped=32 * MIB)
    assert memory_limits(root) == (MemoryLimit(256 * MIB, 32 * MIB),)


@pytest.mark.parametrize("lines", [(), ("0::/../..",), ("0::/a",), ("3:memory:/",)])
def test_without_limits_there_are_none(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert memory_limits(process_in(tmp_path, *lines) if lines else tmp_path) == ()


def test_a_limit_bounds_what_a_process_takes_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    before = (memory.device_memory(), memory.free_memory())
    monkeypatch.setattr(memory, "memory_limits", lambda: (MemoryLimit(96 * MIB, 32 * MIB), MemoryLimit(UNLIMITED, 0)))
    assert (memory.device_memory(), memory.free_memory()) == (96 * MIB, 64 * MIB)
    monkeypatch.setattr(memory, "memory_limits", lambda: (MemoryLimit(UNLIMITED, 0),))
    assert memory.device_memory() == before[0]
    assert memory.free_memory() > 64 * MIB
    assert mx.default_device() == mx.Device(mx.cpu)
