"""Memory that the control groups of this process still allow: what a container or a unit of systemd is limited to.

Version 1 and 2 of the kernel's files: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.max, memory.current)
and https://docs.kernel.org/admin-guide/cgroup-v1/memory.html (memory.limit_in_bytes, memory.usage_in_bytes).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The limit of a group, and what its processes use without files that the kernel would drop, in bytes."""

    limit: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


def memory_limits(root: Path = ROOT) -> tuple[MemoryLimit, ...]:
    """Return the limits of this process's groups and of those around them; none where nothing is limited.

    `root` is where /proc and /sys lie.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return ()
    found: list[MemoryLimit] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        found += [one for folder in _folders(mount, path) if (one := _limit(folder, *names)) is not None]
    return tuple(found)


def _folders(mount: Path, path: str) -> Iterator[Path]:
    """Yield the folder of a group and those around it; a container may see the mount as its own group alone."""
    folder = mount / path.lstrip("/")
    while folder != mount and mount in folder.parents:
        yield folder
        folder = folder.parent
    yield mount


def _limit(folder: Path, limit_name: str, usage_name: str, dropped_name: str) -> MemoryLimit | None:
    """Read a group; None if it has no limit."""
    try:
        limit, used = (folder / limit_name).read_text().strip(), int((folder / usage_name).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdecimal():  # "max"
        return None
    return MemoryLimit(int(limit), max(0, used - int(statistics.get(dropped_name, 0))))
