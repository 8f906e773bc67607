"""One line of JSON for each request and each failure, if `server.request_log` names a file."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parallm.errors import ConfigError
from parallm.json_log import JsonFormatter, is_json
from parallm.server.operation.request_context import current_request

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
def writing_request_log(target: str | None) -> Iterator[None]:
    """Append to the file `target`, or write to standard error for `stderr`. Raises ConfigError."""
    if target is None:
        yield
        return
    handler = _handler(target)
    handler.setFormatter(JsonFormatter(request_fields))
    handler.setLevel(logging.INFO)
    process_log_has_them = target == STDERR and any(map(is_json, logging.root.handlers))
    failures = [] if process_log_has_them else [logging.getLogger(name) for name in FAILURE_LOGGERS]
    failure_handler = _FailureHandler(handler)
    request_log.addHandler(handler)
    request_log.setLevel(logging.INFO)
    for logger in failures:
        logger.addHandler(failure_handler)
    try:
        yield
    finally:
        request_log.removeHandler(handler)
        request_log.setLevel(logging.WARNING)
        for logger in failures:
            logger.removeHandler(failure_handler)
        handler.close()


class _FailureHandler(logging.Handler):
    """Passes warnings and errors on to `target`."""

    def __init__(self, target: logging.Handler) -> None:
        super().__init__(logging.WARNING)
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        self._target.handle(record)


def _handler(target: str) -> logging.Handler:
    if target == STDERR:
        return logging.StreamHandler(sys.stderr)
    try:
        return logging.FileHandler(target)
    except OSError as error:
        raise ConfigError(f"server.request_log={target} cannot be written: {error}; name another file") from error
