"""The buffer's file: one JSON object per line, appended off the event loop, read when a run goes on."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from parallm.metrics.json_lines import write_whole

logger = logging.getLogger(__name__)

Line = Callable[[], dict[str, Any]]
"""Makes the object of a line, in the writing thread."""
OWNER_ONLY = 0o600


class Journal:
    """Lines reach the system in the order of `append`, a moment later; a disk that refuses costs lines, not the run.

    The file holds what clients have sent, so only its owner may read it.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trajectories")
        self._has_failed = False
        self.num_lines = 0
        """Asked for since the file was last written anew."""

    def append(self, line: Line) -> None:
        self.num_lines += 1
        self._thread.submit(self._write, self._append, [line])

    def rewrite(self, lines: Iterable[Line]) -> None:
        """Let the file hold these lines alone."""
        kept = list(lines)
        self.num_lines = len(kept)
        self._thread.submit(self._write, self._replace, kept)

    def close(self) -> None:
        """Wait until everything is written."""
        self._thread.shutdown()

    def _append(self, text: str) -> None:
        self._file.touch(OWNER_ONLY)
        with self._file.open("a", encoding="utf-8") as lines:
            # a disk that has refused may have taken half a line
            lines.write("\n" + text if self._has_failed else text)

    def _replace(self, text: str) -> None:
        self._file.with_name(self._file.name + ".tmp").touch(OWNER_ONLY)
        write_whole(self._file, text)

    def _write(self, how: Callable[[str], None], lines: list[Line]) -> None:
        try:
            # ASCII: a text may hold half a surrogate pair
            how("".join(json.dumps(line()) + "\n" for line in lines))
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                logger.warning("cannot write %s: %s; trajectories are lost if the process ends", self._file, error)
            self._has_failed = True


def read_journal(file: Path) -> Iterator[dict[str, Any]]:
    """The readable lines; a process that was killed may have left half of one."""
    if not file.is_file():
        return
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(values, dict):
            yield values
