"""What the log of a hosted environment tells of it. atroposlib says these things nowhere else."""

import re
from pathlib import Path

SIGNS = {
    "equal_scores": "Scores are the same in a group",
    "too_long": "Token length is too long in a group",
    "wrong_size": "Group structure invalid, or token count mismatch",
    "nothing_collected": "handle_env: No trajectories collected",
    "trajectories_failed": "Error in collect_trajectories:",
    "not_sent": "Failed to send ",
    "refused": "Client error: ",
    "timed_out": " has timed out after ",
    "other_servers": "localhost:900",
}
"""What a line holds, by what it means."""
_REGISTERED = re.compile(r"Initialized env with id (\d+)")


class EnvironmentLog:
    """Reads what has come since it was read last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0  # what an earlier run has left
        self.env_id: int | None = None
        """Under which run-api knows the environment."""
        self.counts: dict[str, int] = {}
        """Lines with each sign."""
        self.examples: dict[str, str] = {}
        """The last of them."""

    def read(self) -> None:
        """Take in whole lines. What is not there yet is not there."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(text) + len(newline)
        for line in text.decode(errors="replace").splitlines():
            self._take(line)

    def forget_counts(self) -> None:
        self.counts, self.examples = {}, {}

    def _take(self, line: str) -> None:
        if found := _REGISTERED.search(line):
            self.env_id = int(found[1])
        for name, sign in SIGNS.items():
            if sign in line:
                self.counts[name] = self.counts.get(name, 0) + 1
                self.examples[name] = line[-300:]
