"""Files of logs that a process appends to for weeks: rotated by itself, or by another program."""

from logging import LogRecord
from logging.handlers import WatchedFileHandler
from pathlib import Path

BACKUPS = 3
"""Files FILE.1 to FILE.3 that are kept, the newest first."""


class LogFile(WatchedFileHandler):
    """Appends to a file, and opens it anew when another program has renamed or removed it."""

    def __init__(self, path: str | Path, max_bytes: int | None = None) -> None:
        """A file of `max_bytes` becomes FILE.1; None: it grows. Raises OSError where it cannot be written."""
        super().__init__(path)
        self._max_bytes = max_bytes

    def emit(self, record: LogRecord) -> None:
        super().emit(record)
        if self._max_bytes is not None and self.stream is not None and self.stream.tell() >= self._max_bytes:
            self.stream.close()
            self._rotate()

    def _rotate(self) -> None:
        path = Path(self.baseFilename)
        for number in range(BACKUPS, 0, -1):
            older = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
            if older.exists():
                older.replace(path.with_name(f"{path.name}.{number}"))
        self.stream = self._open()
        self._statstream()
