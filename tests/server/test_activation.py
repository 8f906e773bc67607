"""Sockets that a service manager has opened, taken over by a process of their own as systemd starts it."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from parallm.errors import ConfigError
from parallm.server.operation.activation import inherited_sockets
from parallm.server.operation.sockets import bind
from parallm.server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
TAKE = """
import os, sys
for number, given in enumerate(sys.argv[1:], 3):
    os.dup2(int(given), number)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(sys.argv) - 1), LISTEN_FDNAMES="a:b")
from parallm.server.operation.activation import inherited_sockets
from parallm.server.operation.sockets import bind
from parallm.server.settings import ServerSettings
from parallm.errors import ParallmError
try:
    bound = bind(ServerSettings(), inherited_sockets())
except ParallmError as error:
    sys.exit(str(error))
print(bound.urls, inherited_sockets(), [name for name in os.environ if name.startswith("LISTEN_")])
print([os.get_inheritable(one.socket.fileno()) for one in bound.sockets])
bound.close()
"""


def take(*listeners: socket.socket) -> subprocess.CompletedProcess[str]:
    """Start a process that takes these sockets over and closes them."""
    files = [str(one.fileno()) for one in listeners]
    # far from 3, where the process puts them
    command: Sequence[str] = [sys.executable, "-c", TAKE, *files]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    numbers = [one.fileno() for one in listeners]
    return subprocess.run(command, env=environment, pass_fds=numbers, capture_output=True, text=True, check=False)


def listening(address: str | tuple[str, int]) -> socket.socket:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    one = socket.socket(family)
    one.bind(address)
    one.listen()
    high = socket.socket(fileno=os.dup(one.fileno()))
    while high.fileno() < 10:  # the process puts them at 3 and 4
        moved = socket.socket(fileno=os.dup(high.fileno()))
        high = moved
    one.close()
    return high


def test_the_sockets_are_taken_once_closed_not_shut_down_and_their_path_stays(tmp_path: Path) -> None:
    path = tmp_path / "parallm.sock"
    path.parent.chmod(0o700)
    with listening(str(path)) as unix, listening(("127.0.0.1", 0)) as tcp:
        path.chmod(0o600)
        done = take(unix, tcp)
        assert done.stderr == ""
        port = tcp.getsockname()[1]
        assert done.stdout.splitlines() == [f"http://127.0.0.1:{port}, unix:{path} [] []", "[False, False]"]
        for family, address in ((socket.AF_UNIX, str(path)), (socket.AF_INET, ("127.0.0.1", port))):
            with socket.socket(family) as client:
                client.connect(address)  # the manager still listens
    assert list(tmp_path.iterdir()) == [path]


def test_a_socket_that_others_reach_needs_keys_as_if_it_were_our_own(tmp_path: Path) -> None:
    with listening(("0.0.0.0", 0)) as open_to_all:
        assert "can be reached from other machines and there are no keys" in take(open_to_all).stderr
        with bind(ServerSettings(control_routes=False), [open_to_all.dup()]) as bound:  # the control
            assert bound.url.startswith("http://0.0.0.0:")
    with listening(str(tmp_path / "wide")) as wide:
        (tmp_path / "wide").chmod(0o666)
        done = take(wide)
        assert "lets other users connect and there are no keys" in done.stderr
        assert done.returncode == 1


def test_what_no_server_can_listen_on_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        assert "no listening stream socket; the socket unit needs ListenStream=" in take(datagrams).stderr
    with (tmp_path / "file").open("w") as file:
        assert "is no socket" in take(file).stderr  # type: ignore[arg-type]  # it has a number, too
    if sys.platform == "linux":
        with listening("\0parallm-test") as abstract:
            assert "abstract namespace" in take(abstract).stderr


def test_sockets_of_another_process_are_left_alone() -> None:
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "1"}
    assert inherited_sockets(environment) == []
    assert environment == {"LISTEN_PID": "1", "LISTEN_FDS": "1"}
    own = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"}
    with pytest.raises(ConfigError, match="LISTEN_FDS=many is no number"):
        inherited_sockets(own)
