"""The context of one HTTP request, for code far from its route: id, key, deadline, and the fields of its log line.

`middleware.py` sets it; tasks that a request starts see the same one. If `server.request_log` names a file, each
request and each failure is a line of JSON there.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from parallm.errors import ConfigError
from parallm.json_log import JsonFormatter, is_json
from parallm.log_files import LogFile
from parallm.server.settings import KeyRole
from parallm.types import TrafficClass

LOCAL = "parallm.local"
"""Key in the ASGI scope of a request that this process makes itself. No server sets it."""
UNIX = "parallm.unix"
"""Key in the ASGI scope of a request over a unix socket: the keys that count there beside the server's."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestContext:
    request_id: str
    headers: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    """Address of the other end of the connection."""
    is_local: bool = False
    """Whether this process itself asks, which needs no key and goes on while the server drains."""
    deadline: float | None = None
    """Time of the event loop at which the answer is given up."""
    give_up: Callable[[], object] | None = None
    """Ends the running work for this request with the error `Draining`."""
    is_given_up: bool = False
    """Set with `give_up`, for the next of several pieces of work."""
    is_watching: bool = False
    """Whether this is a stream without an end of its own."""
    route: str | None = None
    """Path of the route, with its parameters by name."""
    api_key: str | None = None
    """Name of the key."""
    api_role: KeyRole | None = None
    """Role of the key."""
    act: str | None = None
    """Kind of the act that the request asks for, if it changes anything but its own answer."""
    values: dict[str, object] = field(default_factory=dict)
    """What an act is about: parameters of the path, fields of the body."""
    refusal: str = ""
    """Message of the error that was answered."""
    model: str | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0

    @property
    def client(self) -> str:
        """Name of the key, else the address."""
        return self.api_key or self.address


current_request: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)
request_traffic: ContextVar[TrafficClass] = ContextVar("request_traffic", default="serving")
"""Class of the completions that the present request asks for: `rollout` where nobody waits for its answer."""


def note_values(values: Mapping[str, object]) -> None:
    """Add fields to what the present request is about, if it is an act. Those without a value are left out."""
    context = current_request.get()
    if context is not None and context.act is not None:
        context.values |= {name: value for name, value in values.items() if value is not None}


request_log = logging.getLogger("parallm.requests")
request_log.propagate = False  # one line a request is too much for the log of a run
request_log.setLevel(logging.WARNING)

STDERR = "stderr"
FAILURE_LOGGERS = ("parallm.server", "uvicorn.error")
"""Loggers whose warnings are written too."""


def request_fields() -> dict[str, Any]:
    """Return the fields of the present request for a line of JSON."""
    context = current_request.get()
    return {"request_id": None if context is None else context.request_id}


@contextmanager
def writing_request_log(target: str | None, max_bytes: int | None = None) -> Iterator[None]:
    """Append to the file `target`, which `max_bytes` rotate, or write to standard error for `stderr`.

    Raises ConfigError.
    """
    if target is None:
        yield
        return
    handler = _handler(target, max_bytes)
    handler.setFormatter(JsonFormatter(request_fields))
    handler.addFilter(lambda record: record.name == request_log.name or record.levelno >= logging.WARNING)
    process_log_has_failures = target == STDERR and any(map(is_json, logging.root.handlers))
    failures = () if process_log_has_failures else FAILURE_LOGGERS
    loggers = [request_log, *map(logging.getLogger, failures)]
    request_log.setLevel(logging.INFO)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        request_log.setLevel(logging.WARNING)
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()


def _handler(target: str, max_bytes: int | None) -> logging.Handler:
    if target == STDERR:
        return logging.StreamHandler(sys.stderr)
    try:
        return LogFile(target, max_bytes)
    except OSError as error:
        raise ConfigError(f"server.request_log={target} cannot be written: {error}; name another file") from error
