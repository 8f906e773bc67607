"""Units of service managers: their texts, and a server that is kept by their rules."""

import configparser
import http.client
import json
import os
import plistlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallm.cli import service
from parallm.cli.program import run
from parallm.cli.units import Served, launchd_agent, systemd_service, systemd_socket

ROOT = Path(__file__).parents[2]
SERVED = Served(
    python=sys.executable,
    keys=["model.path=nano", "name=50%", "server.adapters={poet: '/a b'}"],
    address="127.0.0.1:8000",
    drain_seconds=20,
    environment={"HF_HOME": "/models/a b"},
)


def read(text: str) -> configparser.RawConfigParser:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[method-assign,assignment]  # names keep their capitals
    unit.read_string(text)
    return unit


@pytest.mark.parametrize("is_system", [False, True])
def test_systemd_takes_the_units_and_finds_the_fault_in_a_broken_one(is_system: bool, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    (tmp_path / "parallm.service").write_text(systemd_service(SERVED, is_system=is_system))
    (tmp_path / "parallm.socket").write_text(systemd_socket(SERVED))

    def verify() -> subprocess.CompletedProcess[str]:
        scope = [] if is_system else ["--user"]
        command = [
            "systemd-analyze",
            "verify",
            *scope,
            str(tmp_path / "parallm.service"),
            str(tmp_path / "parallm.socket"),
        ]
        environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = verify()
    assert (done.returncode, [line for line in done.stderr.splitlines() if "parallm." in line]) == (0, []), done.stderr
    broken = systemd_service(SERVED, is_system=is_system).replace("Restart=on-failure", "Restart=sometimes")
    (tmp_path / "parallm.service").write_text(broken)
    assert "sometimes" in verify().stderr


def test_words_of_a_command_reach_the_program_as_they_are() -> None:
    command = read(systemd_service(SERVED, is_system=False))["Service"]["ExecStart"]
    assert "name=50%%" in command
    assert [word.replace("%%", "%") for word in shlex.split(command)] == SERVED.command
    assert 'Environment="HF_HOME=/models/a b"' in systemd_service(SERVED, is_system=False)


def test_the_agent_of_launchd_is_a_property_list() -> None:
    text = launchd_agent(SERVED, logs="/logs", folder="/state")
    agent = plistlib.loads(text)
    assert agent["ProgramArguments"][:3] == [sys.executable, "-m", "parallm.serve"]
    assert agent["ProgramArguments"][-3:] == ["server.uds=auto", "log_file=/logs/serve.log", "log_max_bytes=10000000"]
    assert (agent["KeepAlive"], agent["RunAtLoad"], agent["ExitTimeOut"]) == ({"SuccessfulExit": False}, True, 50)
    assert b"Written by `parallm service install`." in text


def test_units_are_written_shown_and_removed_and_those_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service, "IS_MAC", False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "systemd" / "user"
    assert run(["service", "install", "--print"]) == 0
    assert not folder.exists()
    assert run(["service", "install", "model.path=parallm/model/nano", "server.port=8123"]) == 0
    unit = (folder / "parallm.service").read_text()
    assert f"ExecStart={sys.executable} -m parallm.serve model.path={ROOT}/parallm/model/nano server.port=8123" in unit
    assert "ListenStream=127.0.0.1:8123\n" in (folder / "parallm.socket").read_text()
    assert run(["service", "install"]) == 0  # anew
    assert run(["service", "uninstall"]) == 0
    assert list(folder.iterdir()) == []
    (folder / "parallm.service").write_text("[Service]\nExecStart=/my/own\n")
    for action in ("install", "uninstall"):
        assert run(["service", action]) == 1
    assert "my/own" in (folder / "parallm.service").read_text()
    capsys.readouterr()
    for key, message in (
        ("server.prot=1", "server.prot: unknown key, did you mean port?"),
        ("server.port=0", "server.port=0: a unit needs a port that stays"),
        ("distributed.workers=2", "distributed.workers=2: the unit is of one process"),
    ):
        assert run(["service", "install", key]) == 1
        assert capsys.readouterr().err.startswith(f"parallm: {message}")


BECOME = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Puts a socket at 3 and becomes the program, as systemd's child does."""


class Supervisor:
    """systemd in small: starts the command of a unit with its sockets, hears it, and starts it again by its rules."""

    def __init__(self, text: str, folder: Path) -> None:
        unit = read(text)["Service"]
        assert (unit["Type"], unit["Restart"], unit["NotifyAccess"]) == ("notify", "on-failure", "main")
        self._final = {0, int(unit["RestartPreventExitStatus"])}
        self._command = shlex.split(unit["ExecStart"])
        self._folder = folder
        self.listener = socket.socket(socket.AF_UNIX)
        self.path = folder / "parallm.sock"
        self.listener.bind(str(self.path))
        self.path.chmod(0o600)
        self.listener.listen()
        self._ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ear.bind(str(folder / "notify"))
        self._ear.settimeout(120)

    def start(self, *keys: str) -> subprocess.Popen[bytes]:
        """Start the server as systemd does: sockets at 3, and its own process id in the environment."""
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "NOTIFY_SOCKET": str(self._folder / "notify"),
            "WATCHDOG_USEC": "500000",
        }
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", BECOME, str(self.listener.fileno()), *self._command, *keys],
                cwd=self._folder,
                env=environment,
                pass_fds=[self.listener.fileno()],
                stdout=log,
                stderr=log,
            )

    def hear(self, word: str) -> None:
        """Wait until the server says it."""
        while word not in self._ear.recv(4096).decode().split("\n"):
            pass

    def starts_again(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the end of the process; return what the unit then says."""
        return process.wait(60) not in self._final

    def close(self) -> None:
        self.listener.close()
        self._ear.close()


@contextmanager
def asking(path: Path, method: str, route: str, body: object = None) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("localhost", timeout=120)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(120)
    connection.sock.connect(str(path))
    connection.request(method, route, None if body is None else json.dumps(body), {"content-type": "application/json"})
    try:
        yield connection.getresponse()
    finally:
        connection.close()


def test_a_server_is_kept_by_the_rules_of_its_unit(tmp_path: Path) -> None:
    keys = ["model.path=nano", "metrics.display=off", "server.state=off", "engine.warmup=false"]
    served = Served(python=sys.executable, keys=keys, address=None, drain_seconds=20, environment={})
    supervisor = Supervisor(systemd_service(served, is_system=False), tmp_path)
    first = supervisor.start()
    second = wrong = None
    try:
        with asking(supervisor.path, "GET", "/v1/status") as answer:  # it waits until the model is loaded
            assert json.load(answer)["pid"] == first.pid
        supervisor.hear("READY=1")
        supervisor.hear("WATCHDOG=1")
        first.kill()
        assert supervisor.starts_again(first)

        second = supervisor.start()
        stream = {"model": "base", "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with asking(supervisor.path, "POST", "/v1/completions", stream) as answer:
            answer.readline()
            second.send_signal(signal.SIGTERM)
            supervisor.hear("STOPPING=1")
            assert answer.read().rstrip().endswith(b"data: [DONE]")  # to its end
        assert not supervisor.starts_again(second)
        assert supervisor.path.is_socket()

        wrong = supervisor.start("server.prot=1")
        assert not supervisor.starts_again(wrong)
        assert "server.prot: unknown key" in (tmp_path / "log").read_text()
    finally:
        for process in (first, second, wrong):
            if process is not None:
                process.kill()
                process.wait()
        supervisor.close()
