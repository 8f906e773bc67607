"""Log records as lines of JSON."""

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any


class JsonFormatter(logging.Formatter):
    """Formats a record as one line: JSON escapes line ends in text of clients."""

    def __init__(self, more: Callable[[], Mapping[str, Any]] = dict) -> None:
        """`more` returns further fields when a record is written. A record's attribute `fields` has its own."""
        super().__init__()
        self._more = more

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._more(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def is_json(handler: logging.Handler) -> bool:
    return isinstance(handler.formatter, JsonFormatter)
