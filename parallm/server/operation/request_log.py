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


def _handler(target: str) -> logging.Handler:
    if target == STDERR:
        return logging.StreamHandler(sys.stderr)
    try:
        return logging.FileHandler(target)
    except OSError as error:
        raise ConfigError(f"server.request_log={target} cannot be written: {error}; name another file") from error
