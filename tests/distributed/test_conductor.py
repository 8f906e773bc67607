"""Workers that Ray places, watches and starts again. Ray runs in processes of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallm.distributed.launcher import CONDUCTOR, launch
from parallm.distributed.settings import DistributedSettings
from parallm.errors import ConfigError
from parallm.server.settings import ServerSettings
from tests.distributed.conftest import DIGEST, ROOT, TINY, Workers, free_ports

PACKAGE = ROOT / "parallm"
EXACT = ("distributed.exact=true", "trainer.max_off_policy_steps=0")
LIMIT_SECONDS = 120.0
OPEN = {"RAY_AUTH_MODE": "disabled"}
"""Without it a token in the home folder decides which nodes may join."""
Start = Callable[..., "Conducted"]


class Conducted:
    """The command with distributed=ray, in a session of its own."""

    def __init__(self, folder: Path, *keys: str) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "parallm.train", *TINY, "distributed.engine=ray", *keys, "hydra.run.dir=run"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | OPEN
        with (folder / "output.txt").open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def versions(self) -> list[tuple[str, str]]:
        log = self.folder / "run" / "run.log"
        return DIGEST.findall(log.read_text()) if log.is_file() else []

    def wait_for_version(self, version: int) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not any(int(number) >= version for number, _ in self.versions()):
            assert time.monotonic() < deadline, self.output
            assert self.process.poll() is None, self.output
            time.sleep(0.05)

    def worker(self, rank: int) -> int:
        """The process of a rank."""
        path = self.folder / "run" / "ranks" / str(rank) / "worker.json"
        process: int = json.loads(path.read_text())["process"]
        return process

    def gangs(self) -> list[list[int]]:
        """Exit codes by gang and rank."""
        lines = (self.folder / "run" / "ranks" / "gangs.jsonl").read_text().splitlines()
        return [[worker["code"] for worker in json.loads(line)["workers"]] for line in lines]

    def wait(self) -> int:
        return self.process.wait(LIMIT_SECONDS)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the command in a folder of its own."""
    pytest.importorskip("ray")
    made: list[Conducted] = []

    def begin(*keys: str) -> Conducted:
        (tmp_path / "ray").mkdir()
        made.append(Conducted(tmp_path / "ray", *keys))
        return made[-1]

    yield begin
    for one in made:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()


def test_no_module_but_the_conductor_imports_ray() -> None:
    imports = re.compile(r"^\s*(import ray|from ray)\b", re.MULTILINE)
    found = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if imports.search(path.read_text())]
    assert [str(path) for path in found] == ["distributed/conductor.py"]
    assert CONDUCTOR == "parallm.distributed.conductor:conduct"


def test_a_missing_package_is_named_with_the_way_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "parallm.distributed.conductor", raising=False)
    with pytest.raises(ConfigError, match=re.escape("pip install 'parallm[ray]'")):
        launch(DistributedSettings(engine="ray", workers=2), ServerSettings(enabled=False), [], tmp_path, "never")


@pytest.mark.slow
def test_a_killed_worker_and_a_killed_actor_cost_no_finished_step(tmp_path: Path, start: Start) -> None:
    whole = Workers(tmp_path)
    whole.run(1, *EXACT, "trainer.steps=16")
    run = start(*EXACT, "trainer.steps=16", "distributed.workers=2", "distributed.restarts=2")
    run.wait_for_version(2)
    os.kill(run.worker(0), signal.SIGKILL)
    run.wait_for_version(6)
    worker = run.worker(1)
    os.kill(parent_of(worker), signal.SIGKILL)
    assert run.wait() == 0, run.output
    assert {int(version): digest for version, digest in run.versions()} == whole.digests()
    assert [(-signal.SIGKILL in codes) for codes in run.gangs()] == [True, True, False]
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.slow
def test_ctrl_c_saves_and_ends_all(start: Start) -> None:
    run = start("trainer.steps=100000", "distributed.workers=2", "distributed.restarts=5", "checkpoint.every=100000")
    run.wait_for_version(2)
    workers = [run.worker(rank) for rank in (0, 1)]
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait() == 0, run.output
    assert len(list((run.folder / "run").glob("step_*"))) == 1
    assert run.gangs() == [[0, 0]]
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


@pytest.mark.slow
def test_the_workers_die_with_the_conductor(start: Start) -> None:
    run = start("trainer.steps=100000", "distributed.workers=2")
    run.wait_for_version(1)
    workers = [run.worker(rank) for rank in (0, 1)]
    run.process.kill()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_node_that_comes_late_is_taken_in(start: Start) -> None:
    with nodes() as join:
        address = join()
        keys = ("trainer.steps=100000", "distributed.workers=2", "distributed.min_workers=1")
        run = start(*keys, f"distributed.address={address}", "distributed.rejoin_seconds=0")
        run.wait_for_version(2)
        assert not (run.folder / "run" / "ranks" / "1").exists()
        join()
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (run.folder / "run" / "ranks" / "1" / "worker.json").exists():
            assert time.monotonic() < deadline, run.output
            time.sleep(0.1)
        before = len(run.versions())
        run.wait_for_version(before + 2)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 0, run.output
        assert run.gangs() == [[0], [0, 0]]
        numbers = [int(number) for number, _ in run.versions()]
        assert sorted(set(numbers)) == list(range(max(numbers) + 1))


@pytest.mark.slow
def test_too_few_places_are_told_with_their_number(start: Start) -> None:
    with nodes() as join:
        run = start("distributed.workers=2", f"distributed.address={join()}", "distributed.timeout_seconds=8")
        assert run.wait() == 75
        assert "Ray has a place for 1 of at least 2 workers; each needs a core" in run.output


def test_a_cluster_that_is_not_there_is_named(start: Start) -> None:
    run = start("distributed.workers=2", "distributed.address=127.0.0.1:1")
    assert run.wait() == 78
    assert "distributed.address=127.0.0.1:1: no Ray cluster answers" in run.output


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@contextmanager
def nodes() -> Iterator[Callable[[], str]]:
    """Starts nodes of one core each, the first of which is the head, and returns its address."""
    processes: list[subprocess.Popen[bytes]] = []
    address = f"127.0.0.1:{free_ports(1)[0]}"

    def join() -> str:
        place = ["--address", address] if processes else ["--head", f"--port={address.rpartition(':')[2]}"]
        options = ["--num-cpus=1", "--num-gpus=0", "--block", "--disable-usage-stats", "--include-dashboard=false"]
        ray = Path(sys.executable).with_name("ray")
        options = [option for option in options if not processes or "dashboard" not in option]
        processes.append(
            subprocess.Popen(
                [str(ray), "start", *place, "--node-ip-address=127.0.0.1", *options],
                env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"} | OPEN,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        return address

    try:
        yield join
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
