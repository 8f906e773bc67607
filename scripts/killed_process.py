"""A command of ours that is killed and started again on the same folder and port."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
from job import clean_environment
from server_process import SECONDS_TO_START, SECONDS_TO_STOP, free_port

RETRY_SECONDS = 0.05


class KilledProcess:
    """`is_up` is set while it answers. Used on one event loop."""

    def __init__(self, program: str, overrides: list[str], folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"{program}.log"
        self.is_up = asyncio.Event()
        self._command = [sys.executable, "-m", program, f"server.port={port}", "metrics.display=lines", *overrides]
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Returns when it answers. Raises RuntimeError if it ends."""
        self.spawn()
        await self.answers()

    def spawn(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, cwd=self.log.parent, env=clean_environment(), stdout=output, stderr=output
            )

    async def answers(self) -> None:
        """Wait until it does. Raises RuntimeError if it ends or takes too long."""
        ends = asyncio.get_running_loop().time() + SECONDS_TO_START
        async with httpx.AsyncClient(trust_env=False) as client:
            while asyncio.get_running_loop().time() < ends:
                assert self._process is not None, "spawned before"
                if self._process.poll() is not None:
                    raise RuntimeError(f"it ended with {self._process.returncode}:\n{self.log.read_text()[-3000:]}")
                try:
                    if (await client.get(f"{self.url}/health")).status_code == httpx.codes.OK:
                        self.is_up.set()
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(RETRY_SECONDS)
        raise RuntimeError(f"{self.url} did not answer within {SECONDS_TO_START:.0f} s")

    def kill(self) -> None:
        """End it as a power button would end its process."""
        assert self._process is not None, "spawned before"
        self.is_up.clear()
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    async def stop(self) -> None:
        """Let it save and leave."""
        assert self._process is not None, "spawned before"
        self.is_up.clear()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(self._process.wait, SECONDS_TO_STOP)
