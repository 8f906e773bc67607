"""Nothing that workers have finished is lost when one is killed: kill -9 of a random rank at a random time.

After each kill the others must end within seconds, with exit code 75 and a reason; a group of another size goes on
where they stopped. At the end every version must be that of an undisturbed run. The control makes versions differ,
which the comparison must find.
"""

import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import pytest
from bench.measurement import request_of_tests

from parallm.distributed.launcher import STOP_SECONDS
from tests.distributed.conftest import DIGEST, Workers

STEPS = 80
KEYS = ("distributed.exact=true", f"trainer.steps={STEPS}", "checkpoint.every=25", "trainer.evaluate_every=50")
SIZES = (2, 3)
EARLY, START_SECONDS, RUN_SECONDS = 0.2, 4.0, 1.5
"""Share of the kills before the first step, the seconds in which they come, and those after it."""
END_SECONDS = 10.0
EXCHANGE_FAILED = 75
ENDED = (0, EXCHANGE_FAILED, -signal.SIGKILL, -signal.SIGTERM)
Record = Callable[[str, object], None]


@pytest.mark.robustness
def test_a_run_whose_workers_are_killed_makes_the_versions_of_an_undisturbed_one(
    tmp_path: Path, record_property: Record
) -> None:
    kills = request_of_tests().size(100, 4)
    whole, group = folder_of(tmp_path, "whole"), folder_of(tmp_path, "group")
    whole.run(1, *KEYS)
    source = random.Random(0)
    survived, lost, number = 0, 0, 0
    seconds: list[float] = []
    while survived < kills:
        number += 1
        group.start(source.choice(SIZES), *KEYS, *(("checkpoint.resume=auto",) if number > 1 else ()))
        before = newest(group)
        wait_until_killed(group, source)
        began = time.monotonic()
        stop_others(group.processes)
        codes = [code for code, _ in group.wait()]
        assert all(code in ENDED for code in codes), codes
        lost += newest(group) < before
        if all(code == 0 for code in codes):  # it was done before the kill
            check(group, whole)
            group = folder_of(tmp_path, f"group_{number}")
            number = 0
        else:
            survived += 1
            seconds.append(time.monotonic() - began)
    group.run(2, *KEYS, *(("checkpoint.resume=auto",) if number else ()))
    check(group, whole)
    record_property("workers.kills_survived", survived)
    record_property("workers.seconds_to_end", median(seconds))
    record_property("workers.longest_seconds_to_end", max(seconds))
    assert lost == 0
    assert median(seconds) < END_SECONDS


@pytest.mark.robustness
def test_other_versions_are_found(tmp_path: Path) -> None:
    whole, other = folder_of(tmp_path, "whole"), folder_of(tmp_path, "other")
    whole.run(1, *KEYS, "trainer.steps=3")
    other.run(2, *KEYS, "trainer.steps=3", "learner.learning_rate=1e-3")
    with pytest.raises(AssertionError):
        check(other, whole)


def folder_of(tmp_path: Path, name: str) -> Workers:
    (tmp_path / name).mkdir()
    return Workers(tmp_path / name)


def newest(group: Workers) -> int:
    """The last version that all workers held, as rank 0 has logged it; -1 before the first."""
    log = group.folder / "run" / "run.log"
    found = DIGEST.findall(log.read_text()) if log.is_file() else []
    return int(found[-1][0]) if found else -1


def wait_until_killed(group: Workers, source: random.Random) -> None:
    """Kill a random worker, before or after the first step of this start."""
    seen = newest(group)
    if source.random() < EARLY:
        time.sleep(source.uniform(0, START_SECONDS))
    else:
        deadline = time.monotonic() + 60
        while newest(group) == seen and any(process.poll() is None for process in group.processes):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(source.uniform(0, RUN_SECONDS))
    source.choice(group.processes).kill()


def stop_others(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Do what a launcher does after a loss: a worker that waits for others to join knows of none."""

    def stop() -> None:
        for process in processes:
            if process.poll() is None:
                process.terminate()

    timer = threading.Timer(STOP_SECONDS, stop)
    timer.daemon = True
    timer.start()


def check(group: Workers, whole: Workers) -> None:
    """Every version of the group is that of the undisturbed run, and none was skipped or made twice differently."""
    text = (group.folder / "run" / "run.log").read_text()
    expected, found = whole.digests(), DIGEST.findall(text)
    assert {int(version) for version, _ in found} == expected.keys()
    assert all(expected[int(version)] == digest for version, digest in found)
