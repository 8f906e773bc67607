"""A process among the workers of a run: it joins them before MLX is imported, and leaves with a reason.

Rank 0 has the run folder. Each worker has `RUN/ranks/R` with `worker.json`: its machine, state and reason to end; there
the other ranks keep their log, too. Imports no MLX.
"""

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from parallm.distributed.channel import Channel, Link, connect, listen, write_frame
from parallm.distributed.identity import Identity, identity_of
from parallm.distributed.settings import DistributedSettings
from parallm.errors import ConfigError, ExchangeFailed

RANKS = "ranks"
"""Folder in the run folder with one folder per worker."""
STATUS = "worker.json"
EXCHANGE_FAILED = 75
"""Exit code after another worker was lost: sysexits' EX_TEMPFAIL, since the same command goes on."""
FAILED = 1
LEAVE_SECONDS = 90.0
"""Time to save and end after a failure; a collective that hangs may keep the process from it."""

logger = logging.getLogger(__name__)


class Lone(AbstractContextManager["Lone"]):
    """A process that trains alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def bound(self, run: Callable[..., int]) -> Callable[..., int]:
        return run

    def __exit__(self, *_: object) -> None: ...


class Team(AbstractContextManager["Team"]):
    """One of several workers, connected with the others."""

    def __init__(self, identity: Identity, channel: Channel, run_folder: Path) -> None:
        self.identity = identity
        self.channel = channel
        self.run_folder = run_folder
        """The folder of rank 0."""
        self.own_folder = run_folder / RANKS / str(identity.rank)
        self.leave_seconds = LEAVE_SECONDS
        self._began = time.time()
        channel.on_failure = self._prepare_to_leave

    @property
    def folder(self) -> Path:
        """The folder in which this process keeps its log and files."""
        return self.run_folder if self.identity.rank == 0 else self.own_folder

    def bound(self, run: Callable[..., int]) -> Callable[..., int]:
        return partial(run, team=self)

    def write_status(self, state: str, reason: str = "") -> None:
        """Write `worker.json`. A disk error costs the file, not the run."""
        values = {
            "rank": self.identity.rank,
            "workers": self.identity.size,
            "backend": self.identity.backend,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "state": state,
            "reason": reason,
            "began": self._began,
            "seconds": time.time() - self._began,
        }
        try:
            self.own_folder.mkdir(parents=True, exist_ok=True)
            (self.own_folder / STATUS).write_text(json.dumps(values, indent=2) + "\n")
        except OSError as error:
            logger.warning("cannot write %s: %s", self.own_folder / STATUS, error)

    def __enter__(self) -> "Team":
        self.write_status("running")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failure = self.channel.failure
        reason = failure or (f"{type(error).__name__}: {error}" if error is not None else "")
        self.write_status("failed" if reason else "finished", reason)
        self.channel.close(reason)
        if failure is not None:
            # a collective may hang for ever, and with it the end of the interpreter
            atexit.register(_leave, EXCHANGE_FAILED if isinstance(error, ExchangeFailed) else FAILED)

    def _prepare_to_leave(self, reason: str) -> None:
        """Tell the reason at once, and end the process whatever hangs in it."""
        self.write_status("failed", reason)
        timer = threading.Timer(self.leave_seconds, _leave, (EXCHANGE_FAILED,))
        timer.daemon = True
        timer.start()


def join_team(settings: DistributedSettings, folder: Path, facts: Mapping[str, Any]) -> Lone | Team:
    """Join the workers that a launcher has started; without one train alone.

    `folder` becomes the run folder if this is rank 0. `facts` must be the same for all. Raises ConfigError with the
    first rank and key that differ, and ExchangeFailed if a worker does not come.
    """
    identity = identity_of()
    if identity is not None and identity.size > 1 and settings.engine == "off":
        raise ConfigError(
            f"a launcher has started {identity.size} processes, and each would train alone; set distributed=mlx"
        )
    if settings.engine == "off" or identity is None or identity.size == 1:
        return Lone(folder)
    if settings.workers not in (None, identity.size):
        raise ConfigError(f"distributed.workers={settings.workers}: the launcher has started {identity.size}")
    if settings.backend not in ("auto", identity.backend):
        raise ConfigError(f"distributed.backend={settings.backend}: the launcher has set up {identity.backend}")
    if settings.exact and identity.size > settings.slots:
        raise ConfigError(f"distributed.slots={settings.slots} is less than the {identity.size} workers; raise it")
    hello = {
        "rank": identity.rank,
        "size": identity.size,
        "facts": dict(facts),
        "machine": socket.gethostname(),
        "cores": available_cores(),
    }
    if identity.rank == 0:
        links, answer = _welcome(identity, hello, folder, settings.timeout_seconds)
    else:
        links, answer = _ask_entry(identity, hello, settings.timeout_seconds)
    _use_cores(answer["cores"])
    channel = Channel(identity.rank, links, size=identity.size, timeout_seconds=settings.timeout_seconds)
    return Team(identity, channel, Path(answer["folder"]))


def available_cores() -> list[int]:
    """The numbers of the cores that this process may use; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _welcome(
    identity: Identity, hello: dict[str, Any], folder: Path, timeout_seconds: float
) -> tuple[list[Link], dict[str, Any]]:
    """Rank 0's side: check what all say and answer."""
    arrived = listen(identity.coordinator, identity.size, timeout_seconds)
    guests = [(json.loads(content), connection) for connection, content in arrived]
    hellos = [hello, *(said for said, _ in guests)]
    mistake = _mistake(hellos)
    for said, connection in guests:
        answer = {"error": mistake, "folder": str(folder.absolute()), "cores": _share(hellos, said)}
        write_frame(connection, "welcome", json.dumps(answer).encode())
    if mistake:
        for _, connection in guests:
            connection.close()
        raise ConfigError(mistake)
    links = [Link(connection, said["rank"]) for said, connection in guests]
    return links, {"folder": str(folder), "cores": _share(hellos, hello)}


def _ask_entry(identity: Identity, hello: dict[str, Any], timeout_seconds: float) -> tuple[list[Link], dict[str, Any]]:
    """The side of the other ranks."""
    connection, content = connect(identity.coordinator, json.dumps(hello).encode(), timeout_seconds)
    answer = json.loads(content)
    if answer["error"]:
        connection.close()
        raise ConfigError(answer["error"])
    return [Link(connection, 0)], answer


def _mistake(hellos: Sequence[dict[str, Any]]) -> str:
    """The first thing that keeps these processes from being one run; empty if nothing does."""
    first, size = hellos[0], len(hellos)
    ranks = sorted(said["rank"] for said in hellos)
    if ranks != list(range(size)):
        return f"the workers have the ranks {ranks} (MLX_RANK), not 0 to {size - 1}"
    for said in hellos[1:]:
        if said["size"] != first["size"]:
            return f"rank {said['rank']} belongs to {said['size']} workers, and rank 0 to {first['size']}"
        if mistake := difference(first["facts"], said["facts"], said["rank"]):
            return mistake
    return ""


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], rank: int) -> str:
    """One line that names the first key whose value differs from rank 0's; empty if none does."""
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            return f"{key} is {theirs.get(key)!r} at rank {rank} and {ours.get(key)!r} at rank 0; it must be the same"
    return ""


def _share(hellos: Sequence[dict[str, Any]], said: dict[str, Any]) -> list[int]:
    """The cores for a worker: its share of those that it has in common with others on its machine."""
    cores = said["cores"]
    local = sorted(other["rank"] for other in hellos if other["machine"] == said["machine"] and other["cores"] == cores)
    count = len(cores) // len(local)
    start = local.index(said["rank"]) * count
    return cores[start : start + count] if count else cores


def _use_cores(cores: Sequence[int]) -> None:
    if cores:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
