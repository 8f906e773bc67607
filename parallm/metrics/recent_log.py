"""The newest lines of the log in memory, for a page, and each new one as news."""

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from parallm.metrics.log_capture import OWN, PROGRESS
from parallm.metrics.news import News

MAX_LINES = 2000
MAX_CHARACTERS = 8192
"""Length of a line; what is longer is cut, and its end says so."""
CUT = " ... (cut; the file of the log has all of it)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A record of the log. Example: `LogLine(time=1.7e9, level="WARNING", logger="parallm.trainer.guard", text=...)`"""

    time: float
    """Unix seconds."""
    level: str
    logger: str
    text: str


class RecentLog(logging.Handler):
    """Keeps records from whatever thread they come: our own from INFO on, those of others from WARNING on."""

    def __init__(self, news: News) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=MAX_LINES)
        self._news = news
        self._guard = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        is_own = record.name.partition(".")[0] == OWN
        if record.name == PROGRESS or record.levelno < (logging.INFO if is_own else logging.WARNING):
            return
        try:
            line = _line(record, self.format(record))
        except Exception:  # noqa: BLE001 - what logging asks of handlers: no log line may end the program
            self.handleError(record)
            return
        with self._guard:
            self._lines.append(line)
        self._news.tell_soon("log", lambda: asdict(line))

    def lines(self) -> list[LogLine]:
        """Return all lines, the oldest first."""
        with self._guard:
            return list(self._lines)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keep what is logged until the end."""
        logging.root.addHandler(self)
        try:
            yield
        finally:
            logging.root.removeHandler(self)
            self.close()


def _line(record: logging.LogRecord, text: str) -> LogLine:
    if len(text) > MAX_CHARACTERS:
        text = text[: MAX_CHARACTERS - len(CUT)] + CUT
    return LogLine(time=round(record.created, 3), level=record.levelname, logger=record.name, text=text)
