"""Several servers of one model behind a front, as `parallm.serve distributed.workers=N` starts them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.processes import free_port

from parallm.config.run_folder import SERVING
from parallm.distributed.identity import FRONT, LISTEN
from parallm.distributed.servers import run_servers
from parallm.distributed.settings import FrontSettings, ServingSettings
from parallm.errors import ConfigError
from parallm.run.workers import copy_operators_state, own_server, shown_url
from parallm.server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
SECONDS = 60.0


class Command:
    def __init__(self, folder: Path, *keys: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        port = self.url.rpartition(":")[2]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "parallm.serve", f"server.port={port}", "name=several", *keys],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", trust_env=False, timeout=SECONDS).json()

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, trust_env=False, timeout=SECONDS)

    def until_ready(self, number: int) -> None:
        deadline = time.monotonic() + SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.log.read_text()
            try:
                if len(self.get("/health")["workers"]) == number:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def servers(self) -> list[int]:
        """Processes of the servers, of which a front is none."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                words = stat.read_text().rpartition(")")[2].split()
                command = (stat.parent / "cmdline").read_text()
            except OSError:
                continue
            if int(words[1]) == self.process.pid and "parallm.serve" in command:
                found.append(int(stat.parent.name))
        return found

    def chat(self, text: str = "2 + 3?", **fields: Any) -> httpx.Response:
        body = {"model": "base", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
        return self.post("/v1/chat/completions", body | fields)

    def end(self) -> None:
        with suppress(ProcessLookupError):  # also servers whose command has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    made: list[Command] = []

    def make(*keys: str) -> Command:
        made.append(Command(tmp_path, *keys))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_server_is_replaced_and_no_client_sees_it(
    command: Callable[..., Command], adapter_folder: Path
) -> None:
    """Changes of operators hold at all servers, also at the one that is started again."""
    own = command("distributed.workers=2", f"server.adapters_root={adapter_folder.parent}")
    own.until_ready(2)
    loaded = own.post("/v1/adapters/load", {"name": "poet", "path": str(adapter_folder)})
    assert loaded.status_code == 200, loaded.text
    assert [own.chat(str(number) * 90, model="poet@1").status_code for number in range(4)] == [200] * 4
    metrics = httpx.get(f"{own.url}/metrics", trust_env=False).text
    for worker in (0, 1):
        assert f'parallm:adapter_versions{{worker="{worker}",adapter="poet"}} 1.0' in metrics
    second = own.servers()[-1]
    os.kill(second, signal.SIGKILL)
    assert [own.chat(str(number)).status_code for number in range(4)] == [200] * 4
    deadline = time.monotonic() + SECONDS
    while len(own.servers()) < 2 or second in own.servers():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    own.until_ready(2)
    assert [own.chat(str(number) * 90, model="poet@1").status_code for number in range(4)] == [200] * 4
    own.process.send_signal(signal.SIGTERM)
    assert own.process.wait(SECONDS) == 0
    assert "was killed by signal 9 and is started again" in own.log.read_text()


def test_an_interrupt_of_the_command_alone_ends_its_servers(command: Callable[..., Command]) -> None:
    own = command("distributed.workers=2")
    own.until_ready(2)
    own.process.send_signal(signal.SIGINT)
    assert own.process.wait(SECONDS) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_servers_end_when_their_command_is_killed(command: Callable[..., Command]) -> None:
    own = command("distributed.workers=2")
    own.until_ready(2)
    servers = own.servers()
    assert len(servers) == 2
    own.process.kill()
    deadline = time.monotonic() + SECONDS
    while any(map(is_server, servers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_server(process: int) -> bool:
    try:
        return "parallm.serve" in Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return False


@pytest.fixture(scope="session")
def adapter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the embedded model, as a run writes it."""
    folder = tmp_path_factory.mktemp("adapters")
    keys = ["trainer.steps=1", "trainer.evaluate_problems=0", "rollout.problems_per_step=2", "rollout.group_size=2"]
    keys += [
        "server=off",
        "metrics.display=off",
        "metrics.curves=false",
        "name=poet",
        f"hydra.run.dir={folder / 'run'}",
    ]
    command = [sys.executable, "-m", "parallm.train", *keys]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=120)
    return next((folder / "run").glob("step_*"))


def test_a_server_that_cannot_start_ends_all(command: Callable[..., Command]) -> None:
    own = command("distributed.workers=2", "model.path=/nowhere")
    assert own.process.wait(SECONDS) != 0
    assert "/nowhere" in own.log.read_text()


@pytest.mark.parametrize(
    ("settings", "server", "words"),
    [
        (ServingSettings(workers=2, front=FrontSettings(enabled=False)), ServerSettings(), "need the front"),
        (ServingSettings(workers=2), ServerSettings(enabled=False), "need the front"),
        (ServingSettings(workers=2, tensor_parallel=2), ServerSettings(), "start each divided server by itself"),
    ],
)
def test_what_servers_cannot_be(settings: ServingSettings, server: ServerSettings, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_servers(settings, server, [])


def test_a_worker_listens_where_its_starter_says(monkeypatch: pytest.MonkeyPatch) -> None:
    public = ServerSettings(host="0.0.0.0", port=8000, ssl_certfile="a.pem", api_keys=(), control_routes=False)
    assert [own_server(public, rank).port for rank in range(3)] == [8000, 8001, 8002]
    assert own_server(ServerSettings(uds="/tmp/a"), 2).uds == "/tmp/a.2"
    off = ServerSettings(enabled=False)
    assert own_server(off, 2) == off  # a key that differs from its default would be warned of
    assert shown_url("http://127.0.0.1:8001") == "http://127.0.0.1:8001"
    monkeypatch.setenv(LISTEN, "[::1]:4321")
    monkeypatch.setenv(FRONT, "https://0.0.0.0:8000")
    own = own_server(public, 1)
    assert (own.host, own.port, own.ssl_certfile, own.control_routes) == ("::1", 4321, None, False)
    assert own_server(ServerSettings(uds="/tmp/a"), 2).uds is None
    assert shown_url("http://[::1]:4321") == "https://0.0.0.0:8000"
    assert shown_url(None) is None


@pytest.mark.parametrize("state", ["auto", "kept", "off"])
def test_a_worker_begins_with_what_operators_have_set_at_the_leader(tmp_path: Path, state: str) -> None:
    leader, own = tmp_path / "leader", tmp_path / "own"
    for folder, text in ((leader, "leader's"), (own, "old")):
        (folder / f"{SERVING}abc").mkdir(parents=True)
        (folder / f"{SERVING}abc" / "serving.json").write_text(text)
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "serving.json").write_text("kept")
    (kept / "process.lock").write_text("another's")
    server = ServerSettings(state=str(kept) if state == "kept" else state)
    copy_operators_state(server, leader, own, 0)
    copy_operators_state(server, leader, own, 1)
    found = (own / f"{SERVING}abc" / "serving.json").read_text()
    assert found == ("leader's" if state == "auto" else "old")
    if state == "kept":
        folder = Path(own_server(server, 1).state)
        assert (folder / "serving.json").read_text() == "kept"
        assert not (folder / "process.lock").exists()
