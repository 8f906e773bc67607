"""Servers that come and go while a trainer samples with them, and what its run must be all the same."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.processes import Server, clean_environment

from parallm.metrics.json_lines import read_rows

KEYS = (
    *("+recipe=arithmetic_grpo", "trainer.evaluate_problems=4", "trainer.evaluate_every=0", "checkpoint.every=1000"),
    *("rollout.problems_per_step=6", "rollout.group_size=4", "rollout.temperature=1.5", "learner.learning_rate=2e-3"),
    *("server=off", "metrics.display=off", "metrics.curves=false", "trainer.max_off_policy_steps=0"),
)
CLOCK = ("time", "seconds/", "engines/", "rollout/tokens_per_second", "serving/", "update/device_seconds")
"""Columns that no two runs have in common."""
LIMIT_SECONDS = 300.0


def server(folder: Path, program: str = "parallm.serve", model: str = "nano", keys: Sequence[str] = ()) -> Server:
    """A server of its own folder that is not started."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = "model=nano" if model == "nano" else f"model.path={model}"
    return Server(program, [chosen, "server.state=off", *keys], folder)


class Trainer:
    """A run of `parallm.train` in a folder."""

    def __init__(self, folder: Path, *keys: str, urls: Sequence[str] = (), program: str = "") -> None:
        """`program`: a file in place of the module."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder / "run"
        engines = [f"rollout.engines=[{','.join(urls)}]"] if urls else []
        start = [program] if program else ["-m", "parallm.train"]
        self._command = [sys.executable, *start, *KEYS, *keys, *engines, f"hydra.run.dir={self.folder}"]
        self._output = folder / "output.txt"
        self.start()

    def start(self, *keys: str) -> None:
        """Start the command, with further keys."""
        with self._output.open("a") as output:
            self.process = subprocess.Popen(
                [*self._command, *keys],
                env=clean_environment() | {"OMP_NUM_THREADS": "1"},
                cwd=self.folder.parent,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def num_steps(self) -> int:
        return len(self.rows())

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.folder / "metrics.jsonl")

    def wait_for_step(self, step: int) -> None:
        """Return when so many steps have finished."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.num_steps < step:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def finish(self) -> list[dict[str, Any]]:
        """Wait for a good end; return the rows of the steps."""
        assert self.process.wait(LIMIT_SECONDS) == 0, self.output
        return self.rows()

    def log(self) -> str:
        return (self.folder / "run.log").read_text()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a step that do not depend on the clock or on who has sampled."""
    return {name: value for name, value in row.items() if not name.startswith(CLOCK)}


def differing_steps(rows: Sequence[Mapping[str, Any]], whole: Sequence[Mapping[str, Any]]) -> list[int]:
    """Steps of `whole` that are missing in `rows`, stand there twice, or have other numbers."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["step"], []).append(plain(row))
    return [row["step"] for row in whole if found.get(row["step"]) != [plain(row)]]


class Churn:
    """Kills servers and starts them again at random, in a thread, until it is stopped; at least one is left alone."""

    def __init__(self, servers: Sequence[Server], source: random.Random, *, pause: tuple[float, float]) -> None:
        """`pause`: shortest and longest time between two acts, in seconds."""
        self.num_kills = 0
        self.num_starts = 0
        self._servers = servers
        self._source = source
        self._pause = pause
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._source.uniform(*self._pause)):
            gone = [server for server in self._servers if server.process.poll() is not None]
            present = [server for server in self._servers if server not in gone]
            if gone and (len(present) <= 1 or self._source.random() < 0.5):
                self._source.choice(gone).spawn()
                self.num_starts += 1
            else:
                self._source.choice(present).kill()
                self.num_kills += 1


def quiet_end(servers: Sequence[Server]) -> None:
    """End servers that were started."""
    for one in servers:
        if one._process is not None:
            one.stop()
