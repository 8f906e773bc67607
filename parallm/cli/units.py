"""The texts by which a service manager keeps a server running: systemd's service and socket, launchd's agent."""

import os
import plistlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MARK = "Written by `parallm service install`."
STOP_SECONDS = 30
"""Time to end beyond that for the last answers."""
WRONG_CONFIG = os.EX_CONFIG
"""Exit code after which a start in the same way ends in the same way."""
LABEL = "io.parallm.serve"
MAX_LOG_BYTES = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a unit needs to know of the server that it keeps."""

    python: str
    """Absolute path of the interpreter."""
    keys: Sequence[str]
    """Arguments of `parallm.serve`."""
    address: str | None
    """HOST:PORT; None: the unix socket alone."""
    drain_seconds: float
    environment: Mapping[str, str]
    """Variables that the server needs and the manager does not give it."""

    @property
    def command(self) -> list[str]:
        return [self.python, "-m", "parallm.serve", *self.keys]

    @property
    def stop_seconds(self) -> int:
        return round(self.drain_seconds) + STOP_SECONDS


def systemd_service(served: Served, *, is_system: bool) -> str:
    """Return the unit of the server, for a user or, as a user of its own, for the machine."""
    variables = "".join(f"Environment={_word(f'{name}={value}')}\n" for name, value in served.environment.items())
    scope = _SYSTEM if is_system else _USER
    return f"""\
# {MARK}
[Unit]
Description=ParaLLM, a language model that is served and trained
Requires=parallm.socket
After=network.target parallm.socket
StartLimitIntervalSec=300
StartLimitBurst=10

[Service]
Type=notify
NotifyAccess=main
ExecStart={" ".join(map(_word, served.command))}
{variables}{scope}
Restart=on-failure
RestartSec=3
# a wrong configuration: no start would end otherwise
RestartPreventExitStatus={WRONG_CONFIG}
TimeoutStartSec=10min
TimeoutStopSec={served.stop_seconds}
KillMode=mixed
KillSignal=SIGTERM
OOMPolicy=stop
# the device answers between two units of work: at least as long as the longest one
#WatchdogSec=300
NoNewPrivileges=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK

[Install]
WantedBy={"multi-user.target" if is_system else "default.target"}
"""


_USER = """\
EnvironmentFile=-%h/.config/parallm/environment
StateDirectory=parallm
WorkingDirectory=%S/parallm"""
_SYSTEM = """\
EnvironmentFile=-/etc/parallm/environment
Environment=HF_HOME=%S/parallm/huggingface
DynamicUser=yes
StateDirectory=parallm
LogsDirectory=parallm
WorkingDirectory=%S/parallm
LimitMEMLOCK=infinity
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes"""


def systemd_socket(served: Served) -> str:
    """Return the unit of the sockets, which stay open while the server is started again."""
    address = "" if served.address is None else f"ListenStream={served.address}\n"
    return f"""\
# {MARK}
[Unit]
Description=Sockets of ParaLLM

[Socket]
ListenStream=%t/parallm/parallm.sock
{address}FileDescriptorName=parallm
SocketMode=0600
DirectoryMode=0700
Accept=no
RemoveOnStop=yes

[Install]
WantedBy=sockets.target
"""


def launchd_agent(served: Served, *, logs: str, folder: str) -> bytes:
    """Return the property list of an agent that starts at login. `logs` and `folder` are absolute paths."""
    keys = ["server.uds=auto", f"log_file={logs}/serve.log", f"log_max_bytes={MAX_LOG_BYTES}"]
    values = {
        "Label": LABEL,
        "ProgramArguments": [*served.command, *keys],
        "EnvironmentVariables": dict(served.environment),
        "WorkingDirectory": folder,
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": served.stop_seconds,
        "ProcessType": "Interactive",  # others are slowed down
        "SoftResourceLimits": {"NumberOfFiles": 4096},
        "StandardOutPath": f"{logs}/screen.log",
        "StandardErrorPath": f"{logs}/screen.log",
    }
    return plistlib.dumps(values, sort_keys=False).replace(b"<plist ", f"<!-- {MARK} -->\n<plist ".encode(), 1)


def _word(text: str) -> str:
    """Return a word of a command as systemd reads it, with nothing left to expand."""
    kept = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return kept if re.fullmatch(r"[\w=./:@,+%-]+", kept) else f'"{kept}"'
