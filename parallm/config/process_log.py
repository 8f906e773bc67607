"""The log of a process: files, levels and form of its records."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TextIO, TypeAlias

from parallm.errors import ConfigError
from parallm.json_log import JsonFormatter
from parallm.log_files import LogFile
from parallm.server.operation.request_context import request_fields

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogForm: TypeAlias = Literal["text", "json"]
OWN = "parallm"


TERMINAL_LINE, FILE_LINE = "parallm: %(levelname)s: %(message)s", "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def logging_to(
    path: Path | None, level: LogLevel | None, form: LogForm, max_bytes: int | None = None, *, on_terminal: bool = True
) -> Iterator[None]:
    """Write ParaLLM's records to the file from INFO on and to standard error from WARNING on, or both from `level` on.

    Raises ConfigError for a file that cannot be written; one of `max_bytes` is rotated.

    `json` writes the same records to both, and the warnings of other packages. A program that has loggers of its own
    sets `on_terminal` to False.
    """
    chosen = None if level is None else logging.getLevelNamesMapping()[level.upper()]
    is_json, own = form == "json", logging.getLogger(OWN)
    logger, level_before = logging.root if is_json else own, own.level
    handlers: list[logging.Handler] = []
    if on_terminal:
        handlers.append(_Terminal(logging.NOTSET if is_json else chosen or logging.WARNING))
        handlers[0].setFormatter(logging.Formatter(TERMINAL_LINE))
    if path is not None:
        try:
            handlers.append(LogFile(path, max_bytes))
        except OSError as error:
            raise ConfigError(f"the log {path} cannot be written: {error.strerror}; name another file") from error
        handlers[-1].setFormatter(logging.Formatter(FILE_LINE))
    own.setLevel(chosen or logging.INFO)
    if is_json:
        logging.captureWarnings(True)
    for handler in handlers:
        if is_json:
            handler.setFormatter(JsonFormatter(request_fields))
            handler.addFilter(_is_relevant)
        logger.addHandler(handler)
    try:
        yield
    finally:
        if is_json:
            logging.captureWarnings(False)
        own.setLevel(level_before)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


def error_line(message: str) -> str:
    """Return the message as a line of the log, for an error that ends the process."""
    record = logging.LogRecord(OWN, logging.ERROR, "", 0, message, None, None)
    return JsonFormatter(request_fields).format(record)


def _is_relevant(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] == OWN


class _Terminal(logging.StreamHandler[TextIO]):
    """Writes to the present `sys.stderr`, which a display that shows log records may replace."""

    def __init__(self, level: int) -> None:
        logging.Handler.__init__(self, level)  # StreamHandler's own would set the stream

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # a property where the base has an attribute
        return sys.stderr
