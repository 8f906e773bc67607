"""One address for a run of two workers: before, during and after the loss of one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest
from bench.processes import free_port

ROOT = Path(__file__).parents[3]
KEYS = (
    *("+recipe=arithmetic_grpo", "name=fronted", "trainer.steps=100000", "trainer.evaluate_problems=0"),
    *(
        "rollout.problems_per_step=3",
        "rollout.group_size=4",
        "checkpoint.every=20",
        "metrics.display=off",
        "metrics.curves=false",
    ),
    *("distributed=mlx", "distributed.workers=2", "distributed.restarts=3", "distributed.front.hold_seconds=120"),
)
SECONDS = 120.0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the workers are found by their files")
def test_clients_see_nothing_of_a_lost_worker_but_the_time_it_takes(tmp_path: Path) -> None:
    port, is_over = free_port(), Event()
    statuses: list[int] = []
    url, run = f"http://127.0.0.1:{port}", tmp_path / "run"
    command = [sys.executable, "-m", "parallm.train", *KEYS, f"server.port={port}", f"hydra.run.dir={run}"]
    with (tmp_path / "log").open("w") as log:
        starter = subprocess.Popen(
            command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
        )

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as client:
            while not is_over.is_set():
                messages = [{"role": "user", "content": f"{len(statuses)} + 3?"}]
                body = {"model": "policy", "messages": messages, "max_tokens": 8}
                statuses.append(client.post("/v1/chat/completions", json=body).status_code)

    def version() -> int:
        response = httpx.get(f"{url}/v1/training/status", timeout=SECONDS, trust_env=False)
        return int(response.json()["version"])

    asking = Thread(target=ask)
    try:
        wait_for(lambda: version() >= 5)
        asking.start()
        before = version()
        process = json.loads((run / "ranks" / "1" / "worker.json").read_text())["process"]
        os.kill(process, signal.SIGKILL)
        wait_for(lambda: json.loads((run / "ranks" / "1" / "worker.json").read_text())["process"] != process)
        wait_for(lambda: version() > before + 3)
        count = len(statuses)
        wait_for(lambda: len(statuses) > count + 5)
        is_over.set()
        asking.join()
        assert set(statuses) == {200}
        assert httpx.post(f"{url}/v1/training/pause", json={}, trust_env=False, timeout=SECONDS).status_code == 200
        starter.send_signal(signal.SIGTERM)
        assert starter.wait(SECONDS) == 0, (tmp_path / "log").read_text()
    finally:
        is_over.set()
        starter.kill()
        starter.wait()


def wait_for(is_so: object) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            if is_so():  # type: ignore[operator]
                return
        except (httpx.TransportError, OSError, KeyError, ValueError):
            pass
        assert time.monotonic() < deadline
        time.sleep(0.1)
