"""A server that is started because a command needs one: once, however many commands need it at the same time."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from parallm.cli.connection import HOST, CommandFailed, address_of, command, connect, get, server
from parallm.client.client import UNIX, Client
from parallm.user_folders import state_folder

LOG, LOCK = "server.log", "start.lock"
LOOK_SECONDS, SECONDS_BETWEEN_LOOKS = 1.0, 0.1
MAX_LOG_BYTES = 1_000_000
"""A longer log of earlier servers becomes FILE.1 before a start."""
IDLE_SECONDS = 1800
"""A server that nobody has asked for ends after so long without a request."""
OWN_NAMES = ("base", "policy")


@contextmanager
def server_for(arguments: Namespace) -> Iterator[Client]:
    """Connect to a server, which is started with the model that is asked for unless one answers or is named.

    Raises CommandFailed.
    """
    is_named = bool(arguments.host or os.environ.get(HOST))
    if not (is_named or arguments.no_start or _answers(if_late=True)):
        _start_once(arguments.model)
    with server(arguments.host) as client:
        yield client


def served_name(client: Client, model: str) -> str:
    """Return the name by which the server knows a model that is given by its path or hub id."""
    models: list[dict[str, Any]] = client.send(get("/v1/models"))["data"]
    if any(one["id"] == model for one in models):
        return model
    roots = {one.get("root") for one in models if one["id"] == "base"}
    return "base" if roots & {model, _path_of(model)} else model


@command
def stop(arguments: Namespace) -> int:
    """End the user's own server: the one at a unix socket, which names its process."""
    address = address_of(arguments.host)
    if not address.startswith(UNIX):
        raise CommandFailed(f"{address} may be on another machine; end it there, or name a unix socket with --host")
    with server(arguments.host) as client:
        pid = int(client.send(get("/v1/status"))["pid"])
    os.kill(pid, signal.SIGTERM)
    while Path(address.removeprefix(UNIX)).is_socket() and _lives(pid):
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return 0


def _answers(*, if_late: bool) -> bool:
    """Return whether a server answers; `if_late` if it listens and says nothing, as one does that loads its model."""
    try:
        with connect(address_of(None), seconds=LOOK_SECONDS) as client:
            client.send(get("/v1/status"))
    except httpx.TimeoutException:
        return if_late
    except httpx.HTTPError:
        return False
    return True


def _start_once(model: str) -> None:
    folder = state_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second command waits here, and then finds the server of the first
        if not _answers(if_late=True):
            _start(model, folder)


def _start(model: str, folder: Path) -> None:
    log = folder / LOG
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    keys = ["server.uds=auto", "server.port=null", f"idle_exit_seconds={IDLE_SECONDS}"]
    if model not in OWN_NAMES:
        quoted = _path_of(model).replace("\\", "\\\\").replace("'", "\\'")
        keys.append(f"model.path='{quoted}'")
    sys.stderr.write(f"parallm: starting a server, which ends after {IDLE_SECONDS // 60} idle minutes; log {log}\n")
    with log.open("ab") as output:
        begins = output.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "parallm.serve", *keys],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C and the end of the terminal are not for it
        )
    while not _answers(if_late=False):
        if process.poll() is not None:
            raise CommandFailed(f"the server ended with {process.returncode}:\n{_said(log, begins)}")
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _said(log: Path, begins: int) -> str:
    with log.open("rb") as file:
        file.seek(begins)
        return file.read().decode(errors="replace").strip()[-2000:]


def _path_of(model: str) -> str:
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
