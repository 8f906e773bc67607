"""One line of JSON for each request and each failure, if `server.request_log` says where."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from parallm.errors import ConfigError
from parallm.server.operation.request_context import current_request

request_log = logging.getLogger("parallm.requests")
request_log.propagate = False  # one line a request is too much for the log of a run
request_log.setLevel(logging.WARNING)

OF_FAILURES = ("parallm.server", "uvicorn.error")
"""Loggers whose warnings are written too."""


class JsonFormatter(logging.Formatter):
    """Nothing that a client sends can begin a line: JSON escapes what would."""

    def format(self, record: logging.LogRecord) -> str:
        context = current_request.get()
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": None if context is None else context.request_id,
        }
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


@contextmanager
def writing_request_log(where: str | None) -> Iterator[None]:
    """Append to the file `where`, or write to standard error for `stderr`. Raises ConfigError."""
    if where is None:
        yield
        return
    handler = _handler(where)
    handler.setFormatter(JsonFormatter())
    handler.setLevel(logging.INFO)
    failures = [logging.getLogger(name) for name in OF_FAILURES]
    for_failures = _Failures(handler)
    request_log.addHandler(handler)
    request_log.setLevel(logging.INFO)
    for logger in failures:
        logger.addHandler(for_failures)
    try:
        yield
    finally:
        request_log.removeHandler(handler)
        request_log.setLevel(logging.WARNING)
        for logger in failures:
            logger.removeHandler(for_failures)
        handler.close()


class _Failures(logging.Handler):
    """Passes warnings and errors on."""

    def __init__(self, target: logging.Handler) -> None:
        super().__init__(logging.WARNING)
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        self._target.handle(record)


def _handler(where: str) -> logging.Handler:
    if where == "stderr":
        return logging.StreamHandler(sys.stderr)
    try:
        return logging.FileHandler(where)
    except OSError as error:
        raise ConfigError(f"server.request_log={where} cannot be written: {error}; name another file") from error
