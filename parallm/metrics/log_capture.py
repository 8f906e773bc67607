"""Log records go through the display while it runs, so that a warning does not tear it. Files go on as they are."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parallm.json_log import is_json

OWN = "parallm"
PROGRESS = "parallm.progress"
"""Logger of what a display has shown already."""


@contextmanager
def captured_logs(emit: Callable[[str, int], None]) -> Iterator[None]:
    """Put `emit`, which shows a text of a log level, in place of the handlers that write text to the console.

    Shows all warnings, and all that our own loggers let pass, unless the log goes to the console as JSON.
    """
    named = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    consoles = [
        (logger, handler)
        for logger in [logging.root, *named]
        for handler in logger.handlers
        if writes_to_console(handler)
    ]
    taken = [(logger, handler) for logger, handler in consoles if not is_json(handler)]
    own = EmitHandler(emit)
    for logger, handler in taken:
        logger.removeHandler(handler)
    if not any(logger is logging.root and is_json(handler) for logger, handler in consoles):
        logging.root.addHandler(own)
    try:
        yield
    finally:
        logging.root.removeHandler(own)
        for logger, handler in taken:
            logger.addHandler(handler)


class EmitHandler(logging.Handler):
    """Hands each record that people should see to `emit`, from whatever thread it comes."""

    def __init__(self, emit: Callable[[str, int], None]) -> None:
        super().__init__()
        self._emit = emit

    def emit(self, record: logging.LogRecord) -> None:
        is_own = record.name.partition(".")[0] == OWN
        if record.name == PROGRESS or (record.levelno < logging.WARNING and not is_own):
            return
        try:
            self._emit(self.format(record), record.levelno)
        except Exception:  # noqa: BLE001 - what logging asks of handlers: no log line may end the program
            self.handleError(record)


def writes_to_console(handler: logging.Handler) -> bool:
    """True for a stream handler on standard output or error; a FileHandler is a stream handler on a file."""
    consoles = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return isinstance(handler, logging.StreamHandler) and any(handler.stream is stream for stream in consoles)
