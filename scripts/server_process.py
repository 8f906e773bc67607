"""`python -m parallm.train` or `python -m parallm.serve` as a process of its own, with its HTTP address."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from job import clean_environment

SECONDS_TO_START = 120.0
SECONDS_TO_STOP = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    url: str
    process_id: int

    def open_files(self) -> int | None:
        """None where the system does not tell."""
        folder = Path(f"/proc/{self.process_id}/fd")
        return len(list(folder.iterdir())) if folder.is_dir() else None

    def resident_megabytes(self) -> float:
        told = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(self.process_id)], capture_output=True, text=True, check=True
        )
        return int(told.stdout) / 1024


@contextmanager
def server_process(program: str, overrides: list[str], folder: Path) -> Iterator[str]:
    """Start the program in `folder`, yield its URL when it answers, and stop it. Raises RuntimeError if it ends."""
    with running_server(program, overrides, folder) as server:
        yield server.url


@contextmanager
def running_server(program: str, overrides: list[str], folder: Path) -> Iterator[Server]:
    """As `server_process`, for those who look at the process, too. `program` is a module or a file."""
    port = free_port()
    given = [program] if program.endswith(".py") else ["-m", program]
    command = [sys.executable, *given, f"server.port={port}", "metrics.display=lines", *overrides]
    with running_command(command, port, folder / f"{Path(program).name}.log", clean_environment()) as server:
        yield server


@contextmanager
def running_command(command: list[str], port: int, log: Path, environment: Mapping[str, str]) -> Iterator[Server]:
    """Any server that answers `/health` on `port`, ours or another's. Raises RuntimeError if it ends by itself."""
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=log.parent, env=environment, stdout=output, stderr=output)
        try:
            wait_until_healthy(process, url, log)
            yield Server(url=url, process_id=process.pid)
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        finally:
            stop(process)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{url} did not answer within {SECONDS_TO_START:.0f} s:\n{log.read_text()[-3000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to finish, then make it."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGTERM)
        try:
            process.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
