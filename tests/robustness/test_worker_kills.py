"""Nothing that workers have finished is lost when one is killed: kill -9 of a random rank, again and again.

The command that has started the workers starts them again, on this machine by itself or by Ray. Kills come while the
processes start, while they sample, while the victim waits in an exchange, and while a checkpoint is written. The new
gang must stand within seconds, and in the end every version must be that of an undisturbed run. The control makes
versions differ, which the comparison must find.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from bench.measurement import request_of_tests

from tests.distributed.conftest import DIGEST, ROOT, TINY, Workers

STEPS = 80
KEYS = ("distributed.exact=true", f"trainer.steps={STEPS}", "checkpoint.every=5", "trainer.evaluate_every=50")
LIMITED = "distributed.timeout_seconds=120"
SIZES = {"mlx": 3, "ray": 2}
PHASES = ("start", "sampling", "exchange", "saving")
START_SECONDS, RUN_SECONDS = 4.0, 1.5
"""Longest time from the start of processes, or from the first step of a gang, to a kill."""
WAIT_SECONDS = 0.3
"""Time for which a victim waits in an exchange for a peer that is stopped."""
GANG_SECONDS = 10.0
LIMIT_SECONDS = 180.0
Record = Callable[[str, object], None]


@pytest.mark.robustness
@pytest.mark.parametrize("engine", SIZES)
def test_a_run_whose_workers_are_killed_makes_the_versions_of_an_undisturbed_one(
    engine: str, tmp_path: Path, record_property: Record
) -> None:
    if engine == "ray":
        pytest.importorskip("ray")
    kills = request_of_tests().size(50, 2)
    whole = Workers(tmp_path)
    whole.run(1, *KEYS)
    expected = whole.digests()
    source = random.Random(engine)
    seconds: list[float] = []
    phases: Counter[str] = Counter()
    for number in range(kills):
        if len(seconds) >= kills:
            break
        run = Run(tmp_path / f"run_{number}", engine)
        try:
            run.kill_until_done(kills - len(seconds), source, phases)
        finally:
            run.end()
        run.check(expected)
        seconds += run.seconds_to_new_gang()
        print(f"{engine}: {len(seconds)} kills, {dict(phases)}, new gang after {seconds[-1]:.1f} s", flush=True)
    record_property("workers.kills_survived", len(seconds))
    record_property("workers.seconds_to_new_gang", median(seconds))
    record_property("workers.longest_seconds_to_new_gang", max(seconds))
    record_property("remark", f"{dict(phases)}, median {median(seconds):.2f} s, longest {max(seconds):.2f} s")
    assert median(seconds) < GANG_SECONDS


@pytest.mark.robustness
def test_other_versions_are_found(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    whole, other = Workers(tmp_path), Workers(tmp_path / "other")
    whole.run(1, *KEYS, "trainer.steps=3")
    other.run(2, *KEYS, "trainer.steps=3", "learner.learning_rate=1e-3")
    with pytest.raises(AssertionError):
        check_versions((other.folder / "run" / "run.log").read_text(), whole.digests())


class Run:
    """A command that starts its workers again, and the kills that it has seen."""

    def __init__(self, folder: Path, engine: str) -> None:
        folder.mkdir()
        self.folder = folder / "run"
        self._size = SIZES[engine]
        self._kills: list[float] = []
        keys = (*KEYS, f"distributed.engine={engine}", f"distributed.workers={self._size}")
        own = ("distributed.restarts=1000", LIMITED, f"hydra.run.dir={self.folder}")
        self._output = folder / "output.txt"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "parallm.train", *TINY, *keys, *own],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                cwd=folder,
                stdout=output,
                stderr=output,
            )

    def kill_until_done(self, kills: int, source: random.Random, phases: Counter[str]) -> None:
        """Kill random workers, each of a gang of its own, until the run or the number of kills is over."""
        seen: set[int] = set()
        while len(self._kills) < kills and (workers := self._new_gang(seen)):
            seen |= set(workers.values())
            victim = source.choice(sorted(workers))
            phase = source.choice(PHASES)
            if not self._wait_for(phase, workers, victim, source):
                continue  # the run is over, or the gang has ended by itself, which `check` finds
            self._kills.append(time.time())
            os.kill(workers[victim], signal.SIGKILL)
            for process in workers.values():
                if process != workers[victim] and phase == "exchange":
                    os.kill(process, signal.SIGCONT)
            phases[phase] += 1

    def newest(self) -> int:
        """The last version that all workers held, as rank 0 has logged it; -1 before the first."""
        log = self.folder / "run.log"
        found = DIGEST.findall(log.read_text()) if log.is_file() else []
        return int(found[-1][0]) if found else -1

    def check(self, expected: dict[int, str]) -> None:
        """Let it train to the end: nothing was lost, and every version is that of the undisturbed run."""
        text = (self.folder / "run.log").read_text()
        check_versions(text, expected)
        held = [int(version) for version, _ in DIGEST.findall(text)]
        assert all(later in (before, before + 1) for before, later in pairwise(held)), held
        assert len(self._gangs()) == len(self._kills) + 1

    def seconds_to_new_gang(self) -> list[float]:
        began = [gang["began"] for gang in self._gangs()]
        return [min(time for time in began if time > killed) - killed for killed in self._kills]

    def end(self) -> None:
        """Wait for the end, which must be a good one."""
        try:
            assert self._process.wait(5 * LIMIT_SECONDS) == 0, self._output.read_text()[-3000:]
        finally:
            self._process.terminate()

    def _gangs(self) -> list[dict[str, float]]:
        path = self.folder / "ranks" / "gangs.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _new_gang(self, seen: set[int]) -> dict[int, int]:
        """Wait for the processes of the next gang; empty if the run is over."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self._process.poll() is None:
            workers = {rank: process for rank, process in self._workers() if process not in seen}
            if len(workers) == self._size:
                return workers
            assert time.monotonic() < deadline, self._output.read_text()[-3000:]
            time.sleep(0.1)
        return {}

    def _workers(self) -> Iterator[tuple[int, int]]:
        """Rank and process of each worker, whoever has started it."""
        wanted = f"hydra.run.dir={self.folder}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (path / "cmdline").read_bytes():
                    variables = dict(one.partition(b"=")[::2] for one in (path / "environ").read_bytes().split(b"\0"))
                    if b"MLX_RANK" in variables:
                        yield int(variables[b"MLX_RANK"]), int(path.name)
            except OSError:  # it has ended
                continue

    def _wait_for(self, phase: str, workers: dict[int, int], victim: int, source: random.Random) -> bool:
        """Wait for the moment of a kill; returns whether all workers are still there."""
        if phase == "start":
            time.sleep(source.uniform(0, START_SECONDS))
            return self._is_whole(workers)
        before, deadline = self.newest(), time.monotonic() + LIMIT_SECONDS
        while self.newest() <= before + 1:
            if not self._is_whole(workers):
                return False
            assert time.monotonic() < deadline, self._output.read_text()[-3000:]
            time.sleep(0.02)
        if phase == "saving":
            deadline = time.monotonic() + LIMIT_SECONDS
            while not list(self.folder.glob(".tmp-*")) and self._is_whole(workers):
                assert time.monotonic() < deadline, self._output.read_text()[-3000:]
                time.sleep(0.0005)
        else:
            time.sleep(source.uniform(0, RUN_SECONDS))
        if not self._is_whole(workers):
            return False
        if phase == "exchange":
            for rank, process in workers.items():
                if rank != victim:
                    os.kill(process, signal.SIGSTOP)
            time.sleep(WAIT_SECONDS)
        return True

    def _is_whole(self, workers: dict[int, int]) -> bool:
        return {process for _, process in self._workers()} >= set(workers.values())


def check_versions(text: str, expected: dict[int, str]) -> None:
    """Every version is that of the undisturbed run, and none was skipped."""
    found = DIGEST.findall(text)
    assert {int(version) for version, _ in found} == expected.keys()
    assert all(expected[int(version)] == digest for version, digest in found)
